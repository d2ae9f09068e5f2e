#pragma once

// One plan: measures the chain as far as needed, searches, and describes what was found.

#include <headroom/model/chain.h>
#include <headroom/plan/search.h>
#include <headroom/train/run_plan.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

class ProfileBook;

/// What a plan for a run is asked to do.
struct RunPlanRequest {
  std::int64_t global_batch = 1;  ///< samples of an update, over all ranks
  std::int64_t num_ranks = 1;     ///< that share them evenly; the plan is that of the largest share
  std::int64_t fixed_micro_batch =
      0;  ///< 0: the planner chooses; a chain that couples samples is never split whatever it says
  std::int64_t budget_bytes = 0;  ///< 0: none
  std::string policy;  ///< --gradient_checkpointing; empty: keep everything, or optimal when there
                       ///< is a budget
  std::optional<at::ScalarType> keep_in_half;  ///< as in ExecutorOptions
  std::string spill_dir;                       ///< where boundaries may be spilled; empty: nowhere
  std::optional<at::ScalarType> compute_in_half;
  /// Nothing needs all gradients at once (clipping does), so that parameters may be updated inside
  /// backward where nothing else fits.
  bool may_update_in_backward = false;
  bool prefetches = false;           ///< one more micro-batch is in memory
  std::int64_t optimizer_bytes = 0;  ///< of its state
  bool optimizer_is_allocated = false;
  std::int64_t resident_bytes =
      -1;                      ///< weights and whatever else stays; negative: what is live now
  std::int64_t update_ns = 0;  ///< that clipping and an update take; 0: guessed from their bytes
  /// Times in training over times of stages that are measured one by one. 0: found out by running
  /// the chosen plan before it is used.
  double time_ratio = 0.0;
  std::int64_t update_scratch_bytes = 0;  ///< that summing gradients over ranks takes
  std::int64_t slack_bytes = 0;           ///< of the budget, to be left free
  bool with_alternatives = false;         ///< also say what half and double the budget would give
  std::vector<Remedy> remedies;           ///< for the error when nothing fits
  ProfileBook* book = nullptr;            ///< of the chain; needed where something must be measured

  std::int64_t rank_batch() const {
    return (global_batch + num_ranks - 1) / num_ranks;
  }  ///< the largest share of a rank
};

/// Throws ConfigError when somebody asks for micro-batches below the global batch of a chain that
/// couples samples, or for several ranks to share it: their losses would not add up to that of the
/// batch. A micro-batch of 0 asks for nothing.
void check_split(const Chain& chain, std::int64_t micro_batch, std::int64_t global_batch,
                 std::int64_t num_ranks);

/// Measures the chain as far as needed and plans. Throws BudgetError, with the floor's parts and
/// the remedies, when nothing fits.
RunPlan plan_run(const RunPlanRequest& request, const Chain& chain);

/// The smallest budget with which the request's fixed_micro_batch can be trained; its own budget is
/// ignored. Throws BudgetError when that cannot even be measured.
std::int64_t smallest_budget(const RunPlanRequest& request, const Chain& chain);

}  // namespace headroom
