#include <headroom/plan/chain_solver.h>

#include "plan/expansion.h"
#include "plan/grouped_chain.h"
#include "plan/intervals.h"
#include "plan/slot_table.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include "plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

namespace headroom {
namespace {

/// Additions below which a finer grid costs no noticeable time.
constexpr double kCheapWork = 2e7;
/// Additions that a rounded solution may cost: some seconds.
constexpr double kMostWork = 8e9;

/// A whole curve may take this many times the work of one plan.
constexpr double kCurvePatience = 10;

/// Different intervals that a chain may have before its stages are grouped: beyond this, looking
/// at all splits of all intervals takes many seconds, however coarse the grid.
constexpr int kMaxIntervals = 130'000;
/// Into so many groups.
constexpr int kNumGroups = 256;

/// The chain in groups, if it is too long to be solved stage by stage. Stages that hand parts of
/// their input on cannot be grouped.
std::unique_ptr<GroupedChain> grouped_if_long(const ChainCosts& chain, bool intern) {
  validate(chain);
  const bool carries =
      std::any_of(chain.stages.begin(), chain.stages.end(), [](const StageCosts& stage) {
        return !stage.carried.empty() || stage.carried_grad_bytes != 0;
      });
  if (carries || chain.stages.size() <= 2 * kNumGroups) return nullptr;
  if (Intervals(ChainNumbers(chain), intern, kMaxIntervals).size() <= kMaxIntervals) return nullptr;
  return std::make_unique<GroupedChain>(chain, kNumGroups);
}

}  // namespace

struct ChainSolver::State {
  State(ChainCosts costs, SolverOptions solver_options)
      : grouped(grouped_if_long(costs, solver_options.intern)),
        chain(std::move(costs)),
        options(solver_options),
        numbers(grouped ? grouped->groups() : chain),
        intervals(numbers, options.intern),
        bounds(numbers, intervals),
        whole(intervals.id(0, numbers.L - 1)) {
    // The last stage is never swept, so that the size of its output (a scalar, mostly) counts only
    // as a part of what it keeps.
    for (int l = 0; l < numbers.L; ++l) {
      const bool is_last = l + 1 == numbers.L;
      for (const ChainNumbers::Option& option : numbers.options[numbers.at(l)])
        taken_gcd = std::gcd(taken_gcd, option.fits ? option.S : 0);
      for (const auto& stored : numbers.stored)
        taken_gcd = std::gcd(taken_gcd, is_last ? 0 : stored[numbers.at(l + 1)]);
      for (const CarriedBytes& part : numbers.carried[numbers.at(l)]) {
        taken_gcd = std::gcd(taken_gcd, part.bytes);
        for (const BoundaryFormat& format : numbers.formats)
          taken_gcd = std::gcd(taken_gcd, shared_bytes(format, part.bytes));
      }
      taken_gcd = std::gcd(taken_gcd, numbers.p[numbers.at(l)]);
    }
    all_gcd = std::gcd(taken_gcd, numbers.G[0]);
    for (int l = 0; l < numbers.L; ++l) {
      const bool is_last = l + 1 == numbers.L;
      all_gcd = std::gcd(all_gcd, numbers.carried_grad[numbers.at(l)]);
      all_gcd = std::gcd(
          all_gcd, std::gcd(numbers.G[numbers.at(l + 1)], is_last ? 0 : numbers.oN[numbers.at(l)]));
      for (const ChainNumbers::Option& option : numbers.options[numbers.at(l)])
        all_gcd = std::gcd(all_gcd, std::gcd(option.oF, option.oB));
    }
    all_gcd = std::max<std::int64_t>(all_gcd, 1);
    taken_gcd = std::max<std::int64_t>(taken_gcd, 1);
  }

  struct Size {
    double entries = 0;
    double work = 0;
  };
  /// How large a table with this slot would be, from the range of memory in which each interval has
  /// a choice.
  Size table_size(std::int64_t slot_bytes, std::int64_t budget_bytes) const {
    Size size;
    for (int id = 0; id < intervals.size(); ++id) {
      const auto [first, last] = intervals.representatives()[numbers.at(id)];
      for (int format = 0; format < numbers.num_formats; ++format) {
        const std::int64_t least = bounds.least(id, format);
        if (least > budget_bytes) continue;
        const double range =
            static_cast<double>(std::min(budget_bytes, bounds.ample(id, format)) - least);
        const double count = range / static_cast<double>(slot_bytes) + 1;
        size.entries += count;
        size.work += count * (last - first + 1) * numbers.num_formats;
      }
    }
    return size;
  }

  bool small_enough(std::int64_t slot_bytes, std::int64_t budget_bytes, bool every_budget) const {
    const Size size = table_size(slot_bytes, budget_bytes);
    if (size.entries * sizeof(std::int64_t) > static_cast<double>(options.max_table_bytes))
      return false;
    return budget_bytes / slot_bytes <= options.max_slots ||
           size.work <=
               static_cast<double>(options.max_lossless_work) * (every_budget ? kCurvePatience : 1);
  }

  /// A grid on which nothing is lost, if there is one of reasonable size. `every_budget`: for all
  /// budgets up to this one, not it alone.
  std::optional<Grid> lossless_grid(std::int64_t budget_bytes, bool every_budget) const {
    if (small_enough(all_gcd, budget_bytes, every_budget))
      return Grid{all_gcd, 0, budget_bytes / all_gcd, true};
    if (!every_budget && taken_gcd != all_gcd &&
        small_enough(taken_gcd, budget_bytes, every_budget)) {
      return Grid{taken_gcd, budget_bytes % taken_gcd, budget_bytes / taken_gcd, true};
    }
    return std::nullopt;
  }

  Grid rounding_grid(std::int64_t budget_bytes, bool round_up, double patience = 1) const {
    std::int64_t slot =
        std::max<std::int64_t>(budget_bytes / std::max<std::int64_t>(options.max_slots, 1), 1);
    const double cheap =
        patience * std::min(kCheapWork, static_cast<double>(options.max_lossless_work));
    while (slot > 1 && table_size(slot / 2, budget_bytes).work <= cheap) slot /= 2;
    const double limit = static_cast<double>(options.max_table_bytes) / sizeof(std::int64_t);
    for (Size size = table_size(slot, budget_bytes);
         slot < budget_bytes && (size.entries > limit || size.work > kMostWork);) {
      slot *= 2;
      size = table_size(slot, budget_bytes);
    }
    return Grid{slot, budget_bytes % slot, budget_bytes / slot, round_up};
  }

  SlotTable make_table(const Grid& grid) const {
    return SlotTable(numbers, intervals, grid, options.prune);
  }

  /// The lossless table that covers the budget, built when there is none yet; null when the sizes
  /// do not allow one.
  const SlotTable* lossless_table(std::int64_t budget_bytes, bool every_budget) {
    if (table != nullptr && table_covers(budget_bytes, every_budget)) return table.get();
    const std::optional<Grid> grid = lossless_grid(budget_bytes, every_budget);
    if (!grid) return nullptr;
    table.reset();
    table = std::make_unique<SlotTable>(make_table(*grid));
    return table.get();
  }

  bool table_covers(std::int64_t budget_bytes, bool every_budget) const {
    const Grid& grid = table->grid();
    if (grid.slot_bytes == all_gcd && grid.residue_bytes == 0)
      return grid.bytes(grid.top) + all_gcd > budget_bytes;
    return !every_budget && budget_bytes % grid.slot_bytes == grid.residue_bytes &&
           grid.bytes(grid.top) >= budget_bytes;
  }

  /// The schedule of the chain that operations on `numbers` stand for.
  Schedule schedule_of(std::vector<Operation> operations) const {
    if (grouped) operations = grouped->expand(operations);
    return schedule_from_operations(chain, std::move(operations));
  }

  Schedule checked_schedule(std::vector<Operation> operations, std::int64_t budget_bytes) const {
    Schedule plan = schedule_of(std::move(operations));
    if (plan.peak_bytes > budget_bytes) {
      throw std::logic_error(
          fmt::format("a plan for {} bytes needs {} bytes", budget_bytes, plan.peak_bytes));
    }
    if (grouped) plan.certified_gap_ns = plan.time_ns - least_time_within(chain, budget_bytes);
    return plan;
  }

  Schedule keep_everything() const {
    return schedule_of(expand_schedule(numbers.L, 0, [this](const Interval& interval) {
      return Decision::keep(numbers.fastest[numbers.at(interval.first)]);
    }));
  }

  /// A plan that fits the smallest budget, whatever its time. Needed only when rounding up leaves
  /// nothing that fits.
  std::vector<Operation> leanest_operations() const {
    return expand_schedule(numbers.L, 0,
                           [this](const Interval& interval) { return leanest_choice(interval); });
  }
  Decision leanest_choice(const Interval& interval) const;

  Schedule rounded_schedule(std::int64_t budget_bytes) const;

  std::unique_ptr<GroupedChain> grouped;  ///< null when the chain is solved stage by stage
  ChainCosts chain;
  SolverOptions options;
  ChainNumbers numbers;  ///< of the chain, or of its groups
  Intervals intervals;
  IntervalBounds bounds;
  int whole;
  std::int64_t taken_gcd = 0;  ///< of the sizes that are taken away from what is left
  std::int64_t all_gcd = 0;    ///< of all sizes
  std::unique_ptr<SlotTable> table;
};

Decision ChainSolver::State::leanest_choice(const Interval& interval) const {
  const int first = interval.first, last = interval.last, format = interval.format;
  const std::int64_t least = bounds.least(intervals.id(first, last), format);
  const std::vector<ChainNumbers::Option>& options_of_first = numbers.options[numbers.at(first)];
  for (std::size_t k = 0; k < options_of_first.size(); ++k) {
    const std::int64_t after = first < last ? numbers.kept(first, format, options_of_first[k]) +
                                                  bounds.least(intervals.id(first + 1, last), 0)
                                            : 0;
    if (std::max(numbers.keep_need(first, last, format, options_of_first[k]), after) <= least)
      return Decision::keep(static_cast<int>(k));
  }
  Sweep sweep(numbers, first, last, format);
  for (int split = first + 1; split <= last; ++split) {
    sweep.extend_to(split);
    const std::int64_t left = numbers.P[numbers.at(last + 1)] - numbers.P[numbers.at(split)] +
                              bounds.least(intervals.id(first, split - 1), format);
    for (int q = 0; q < numbers.num_formats; ++q) {
      if (!numbers.useful(q, split)) continue;
      const std::int64_t right = numbers.added_as(q, first, format, split - 1) +
                                 bounds.least(intervals.id(split, last), q);
      if (std::max({sweep.need(q), left, right}) <= least) return Decision::sweep(split, q);
    }
  }
  throw std::logic_error("the planner cannot explain its own floor");
}

/// Without a lossless grid: rounding up gives a plan that fits, and rounding down bounds the time
/// from below (of groups it would bound the wrong chain).
Schedule ChainSolver::State::rounded_schedule(std::int64_t budget_bytes) const {
  std::int64_t lower_bound_ns = 0;
  if (!grouped) {
    const SlotTable down = make_table(rounding_grid(budget_bytes, false));
    lower_bound_ns = down.time_ns(down.grid().top);
    // The bound may be a real plan: then it is the answer, and nothing was lost.
    Schedule plan = schedule_of(down.extract(down.grid().top));
    if (plan.peak_bytes <= budget_bytes) return plan;
  }
  const SlotTable up = make_table(rounding_grid(budget_bytes, true));
  const std::int64_t top = up.grid().top;
  Schedule plan = up.feasible(top) ? checked_schedule(up.extract(top), budget_bytes)
                                   : checked_schedule(leanest_operations(), budget_bytes);
  if (!grouped) plan.certified_gap_ns = plan.time_ns - lower_bound_ns;
  return plan;
}

ChainSolver::ChainSolver(ChainCosts chain, SolverOptions options)
    : state_(std::make_unique<State>(std::move(chain), options)) {}
ChainSolver::~ChainSolver() = default;
ChainSolver::ChainSolver(ChainSolver&&) noexcept = default;
ChainSolver& ChainSolver::operator=(ChainSolver&&) noexcept = default;

const ChainCosts& ChainSolver::chain() const { return state_->chain; }
std::int64_t ChainSolver::smallest_budget_bytes() const {
  return state_->bounds.least(state_->whole, 0);
}
std::int64_t ChainSolver::ample_budget_bytes() const {
  return state_->bounds.ample(state_->whole, 0);
}

std::int64_t ChainSolver::least_time_ns() const {
  std::int64_t time_ns = 0;
  const ChainNumbers& n = state_->numbers;
  for (int l = 0; l < n.L; ++l) time_ns += n.options[n.at(l)][n.at(n.fastest[n.at(l)])].time_ns;
  return time_ns;
}

Schedule ChainSolver::schedule(std::int64_t budget_bytes) {
  if (budget_bytes < smallest_budget_bytes()) {
    throw BudgetError(
        fmt::format("budget {} ({} bytes) is below the {} ({} bytes) that the leanest schedule of "
                    "this chain needs; raise "
                    "--memory_budget or use a smaller micro-batch",
                    format_bytes(budget_bytes), budget_bytes, format_bytes(smallest_budget_bytes()),
                    smallest_budget_bytes()));
  }
  if (budget_bytes >= ample_budget_bytes()) return state_->keep_everything();
  if (const SlotTable* table = state_->lossless_table(budget_bytes, false)) {
    return with_found_inputs(
        state_->chain,
        state_->checked_schedule(table->extract(table->grid().index_of_budget(budget_bytes)),
                                 budget_bytes),
        budget_bytes);
  }
  state_->table.reset();  // makes room for the two that follow
  return with_found_inputs(state_->chain, state_->rounded_schedule(budget_bytes), budget_bytes);
}

std::vector<FrontierPoint> ChainSolver::frontier() {
  std::vector<FrontierPoint> points;
  const std::int64_t ample = ample_budget_bytes();
  const SlotTable* exact = state_->grouped ? nullptr : state_->lossless_table(ample, true);
  if (exact != nullptr) {
    // At the smallest budget for its time a plan uses all of it: with a lower peak it would have
    // fitted a smaller one.
    for (const std::int64_t index : exact->steps()) {
      points.push_back(
          {exact->grid().bytes(index), exact->time_ns(index), exact->grid().bytes(index)});
    }
    return points;
  }
  state_->table.reset();
  const SlotTable up = state_->make_table(state_->rounding_grid(ample, true, kCurvePatience));
  const auto add = [&](const Schedule& plan) {
    if (points.empty() || plan.time_ns < points.back().time_ns)
      points.push_back({plan.peak_bytes, plan.time_ns, plan.peak_bytes});
  };
  add(state_->schedule_of(state_->leanest_operations()));
  for (const std::int64_t index : up.steps()) add(state_->schedule_of(up.extract(index)));
  // Rounding hides by how much less each plan fits, so that a later one may need less memory than
  // an earlier, slower one.
  std::stable_sort(points.begin(), points.end(),
                   [](const FrontierPoint& a, const FrontierPoint& b) {
                     return std::make_pair(a.budget_bytes, a.time_ns) <
                            std::make_pair(b.budget_bytes, b.time_ns);
                   });
  std::vector<FrontierPoint> curve;
  for (const FrontierPoint& point : points) {
    if (curve.empty() || point.time_ns < curve.back().time_ns) curve.push_back(point);
  }
  return curve;
}

bool ChainSolver::frontier_is_exact() const {
  return !state_->grouped && state_->lossless_grid(ample_budget_bytes(), true).has_value();
}

}  // namespace headroom
