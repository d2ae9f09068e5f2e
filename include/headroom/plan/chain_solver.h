#pragma once

#include <headroom/plan/schedule.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace headroom {

struct SolverOptions {
  /// The memory axis is divided into slots of the greatest common divisor of all sizes whenever
  /// that gives at most this many slots, or when the table costs no more than max_lossless_work all
  /// the same; then nothing is lost. Otherwise into about this many, or more.
  std::int64_t max_slots = 4096;
  /// Additions; 10^9 take about half a second.
  std::int64_t max_lossless_work = 1'000'000'000;
  /// Bound of the table, which is most of what the planner itself occupies.
  std::int64_t max_table_bytes = std::int64_t{512} << 20;
  /// Two exact speed-ups, to be switched off in tests only.
  bool prune = true;
  bool intern = true;
};

/// Finds the fastest schedule of a chain inside a budget, optimal among persistent schedules (those
/// that drop a held boundary only after its backward). A dynamic programme over (first stage, last
/// stage, format of the input, memory): see docs/planning.md. Chains of many hundred different
/// stages are solved in groups of stages: their schedules fit, and the gap says what may be lost.
/// Budgets count everything but the chain's input. Deterministic; one thread.
class ChainSolver {
 public:
  /// Throws ConfigError on a chain that validate() refuses.
  explicit ChainSolver(ChainCosts chain, SolverOptions options = {});
  ~ChainSolver();
  ChainSolver(ChainSolver&&) noexcept;
  ChainSolver& operator=(ChainSolver&&) noexcept;

  const ChainCosts& chain() const;

  /// The smallest budget that any persistent schedule fits; exact. Of a chain that is solved in
  /// groups: the smallest that schedule() can meet.
  std::int64_t smallest_budget_bytes() const;
  /// A budget at which the fastest way of running every stage once fits; from here on more memory
  /// buys nothing.
  std::int64_t ample_budget_bytes() const;
  /// The time there: no schedule takes less.
  std::int64_t least_time_ns() const;

  /// The fastest schedule inside the budget; its peak is checked in exact bytes. A table once built
  /// serves all later budgets that it covers. Throws BudgetError below smallest_budget_bytes().
  Schedule schedule(std::int64_t budget_bytes);

  /// Every budget at which the time changes, from the smallest that fits to the one from which on
  /// nothing is gained. Exact when frontier_is_exact(); otherwise each point is a real plan, but a
  /// faster one may exist within its slot.
  std::vector<FrontierPoint> frontier();
  bool frontier_is_exact() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headroom
