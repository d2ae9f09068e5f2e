#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// Where the bytes of a step are, besides what the schedule moves.
struct StaticBytes {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;  ///< allocated for the whole window; 0 where they appear in backward
                               ///< (StageCosts::param_grad_bytes)
  std::int64_t optimizer = 0;
  std::int64_t slack = 0;  ///< left free on purpose

  std::int64_t total() const { return weights + gradients + optimizer + slack; }
};

/// How the gradients of parameters are held.
enum class GradientMode {
  kUnallocated,       ///< they appear as backward goes: the only micro-batch of a window
  kPreallocated,      ///< they are there from the second micro-batch on, and count for all
  kUpdatedInBackward  ///< each parameter is updated, and its gradient freed, inside backward
};

/// A way to hold weights, gradients and optimizer state, of those that the user left open.
struct StaticChoice {
  GradientMode gradients = GradientMode::kPreallocated;
  StaticBytes bytes;
  std::int64_t optimizer_ns = 0;  ///< of one update
  std::int64_t optimizer_transient_bytes =
      0;  ///< during the update, above static bytes and the gradients that appeared
  /// 0: any. 1 for what is right only with a single micro-batch, such as updating inside backward.
  std::int64_t max_accumulation_steps = 0;
};

/// What one micro-batch of a given size costs.
struct MicroBatchCosts {
  ChainCosts chain;
  std::int64_t input_bytes = 0;  ///< in memory from the micro-batch's forward to its backward
  /// Of work on the micro-batch before the first one of the window is scheduled (a forward whose
  /// result all of them need): its time, and the most bytes that it has live, above the static
  /// bytes but for gradients, which are not there yet.
  std::int64_t prepare_ns = 0;
  std::int64_t prepare_bytes = 0;
};

/// Something that the user can change when nothing fits, and the bytes that it would save.
struct Remedy {
  std::string change;  ///< e.g. "choose --optim adafactor"
  std::int64_t saved_bytes = 0;
};

struct PlanRequest {
  std::int64_t budget_bytes = 0;        ///< everything that may be live at once on this rank
  std::int64_t num_samples = 0;         ///< of one update on this rank
  std::int64_t micro_batch_size = 0;    ///< the largest micro-batch, if the user fixed it; 0: free
  std::int64_t accumulation_steps = 0;  ///< if the user fixed them; 0: free
  std::vector<StaticChoice> choices;    ///< at least one; of equally fast ones the first is taken
  /// Called once for each size and choice that is looked at, in a fixed order. Must give the same
  /// numbers for the same arguments. Nothing: a micro-batch of this size is known not to fit.
  std::function<std::optional<MicroBatchCosts>(std::int64_t micro_batch_size,
                                               const StaticChoice& choice)>
      costs;
  /// Called before each schedule is solved, where it is set; whatever it throws ends the search.
  std::function<void()> before_each;
  std::vector<Remedy> remedies;    ///< for the error when nothing fits
  SolverOptions solver = quick();  ///< for each of the many schedules that a search solves

  static SolverOptions quick() {
    SolverOptions options;
    options.max_lossless_work = 20'000'000;
    return options;
  }
};

/// `count` micro-batches of `size` samples, each carried out by `schedule`.
struct PlannedMicroBatches {
  std::int64_t size = 0;
  std::int64_t count = 0;
  Schedule schedule;
};

/// The most bytes that are live in each phase of an update. The loss is part of the last stage. At
/// the update itself no micro-batch is in memory.
struct PhasePeaks {
  std::int64_t forward_bytes = 0;  ///< recomputation included
  std::int64_t backward_bytes = 0;
  std::int64_t update_bytes = 0;

  std::int64_t largest() const {
    return std::max(std::max(forward_bytes, backward_bytes), update_bytes);
  }
};

/// The decision for one update of one rank: a split of its samples, and the schedule of each part.
struct BatchPlan {
  std::size_t choice = 0;                                ///< index into PlanRequest::choices
  GradientMode gradients = GradientMode::kPreallocated;  ///< of that choice
  std::int64_t accumulation_steps = 1;
  /// Balanced: the larger size first, then, where they do not divide evenly, micro-batches with one
  /// sample less.
  std::vector<PlannedMicroBatches> micro_batches;
  std::int64_t input_bytes = 0;
  std::int64_t time_ns = 0;  ///< of the update: all micro-batches and the optimizer
  PhasePeaks peaks;
  std::int64_t peak_bytes = 0;        ///< the largest of them
  std::int64_t certified_gap_ns = 0;  ///< no split, choice and persistent schedules of this request
                                      ///< are faster by more than this
  int num_candidates = 0;             ///< pairs of split and choice
  int num_solved = 0;                 ///< those that the lower bound did not rule out

  /// The largest micro-batch. Requires a plan that was made.
  const PlannedMicroBatches& largest() const { return micro_batches.front(); }
  /// What to do with a micro-batch of `num_samples`: the operations of the smallest one that is at
  /// least as large. Throws std::logic_error when there is none.
  const std::vector<Operation>& operations_for(std::int64_t num_samples) const;
};

/// The least memory with which the request could be served, whatever the time, and what it consists
/// of.
struct BudgetFloor {
  std::int64_t bytes = 0;
  std::size_t choice = 0;
  std::int64_t micro_batch_size = 0;
  StaticBytes static_bytes;
  std::int64_t input_bytes = 0;
  std::int64_t stage_bytes =
      0;  ///< the leanest schedule of the chain: mostly its one largest stage
  std::int64_t update_bytes = 0;   ///< in place of inputs and stage_bytes where the update needs
                                   ///< more: gradients that appeared and temporaries
  std::int64_t prepare_bytes = 0;  ///< the same for MicroBatchCosts::prepare_bytes
};

/// Chooses micro-batch size, accumulation steps, static choice and schedule together: the fastest
/// combination that fits the budget, all phases considered. Deterministic. Throws ConfigError on a
/// request that makes no sense, and BudgetError with the floor, its parts and the remedies when
/// nothing fits.
BatchPlan make_plan(const PlanRequest& request);

/// The plan of a fixed policy at the request's micro_batch_size, with the first choice that allows
/// its number of steps: as fast and as large as it is, whatever the budget. Throws BudgetError when
/// the costs say that this size, or the first option of a stage, does not fit.
BatchPlan make_policy_plan(const PlanRequest& request, const Policy& policy);

/// The floor of the request, its budget ignored.
BudgetFloor find_floor(const PlanRequest& request);

/// The chain with gradients that were allocated before: none appear in backward.
ChainCosts with_gradients_allocated(ChainCosts chain);
/// The chain with an update inside backward: the gradients of a stage live only while it runs
/// backward.
ChainCosts with_update_in_backward(ChainCosts chain);

}  // namespace headroom
