#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>
#include <headroom/plan/plan.h>
#include <headroom/plan/search.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "memory"

namespace headroom {

class Json;

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
  std::optional<at::ScalarType> keep_in_half;  ///< as of the executor
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
  std::string cache_folder;  ///< where measured costs are kept between runs; empty: nowhere
  std::string cache_key;     ///< what they depend on: model, sizes, device, threads, version
  std::function<MicroBatch(std::int64_t num_samples)> load;  ///< a micro-batch to measure with
  std::shared_ptr<ProfileBook>
      book;  ///< to go on with, of the same chain and load; null: a new one

  std::int64_t rank_batch() const {
    return (global_batch + num_ranks - 1) / num_ranks;
  }  ///< the largest share of a rank
};

/// How a run is trained: the split of each rank's share of the global batch, the operations of each
/// micro-batch, and what they are predicted to cost.
struct RunPlan {
  std::int64_t global_batch = 1;  ///< over all ranks
  std::int64_t num_ranks = 1;
  std::int64_t micro_batch = 1;        ///< the largest of the micro-batches
  std::int64_t num_micro_batches = 1;  ///< of the largest share of a full window
  std::map<std::int64_t, std::vector<Operation>> operations_by_size;

  bool update_in_backward =
      false;  ///< each parameter is updated, and its gradient freed, as soon as it is complete

  bool is_predicted =
      false;  ///< false: nothing was asked for that needs a prediction, and what follows is empty
  std::int64_t budget_bytes = 0;
  std::int64_t predicted_peak_bytes = 0;
  double predicted_step_seconds = 0.0;
  std::map<std::string, std::int64_t>
      bytes_by_owner;  ///< weights, gradients, optimizer, inputs, activations, other
  std::map<std::string, std::int64_t> peak_by_phase;  ///< forward, backward, update
  std::string policy;
  Plan schedule;                                       ///< of the largest micro-batch
  ChainCosts costs;                                    ///< that it was made for
  std::vector<std::vector<std::string>> option_names;  ///< by stage
  double profile_seconds = 0.0;
  double time_ratio = 1.0;  ///< as of the request; already part of predicted_step_seconds

  struct Alternative {
    std::int64_t budget_bytes = 0;
    bool fits = false;
    std::int64_t micro_batch = 0;
    std::int64_t num_micro_batches = 0;
    double step_seconds = 0.0;
    std::int64_t peak_bytes = 0;
  };
  std::vector<Alternative> alternatives;

  /// Bytes of state that each optimizer would have for this model, by its name in --optim. Filled
  /// in by Trainer::plan().
  std::vector<std::pair<std::string, std::int64_t>> optimizer_state_bytes;

  /// What to do with a micro-batch of `num_samples`, which is at most micro_batch.
  const std::vector<Operation>& operations_for(std::int64_t num_samples) const;
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

Json to_json(const RunPlan& plan);

/// The plan for people: the split, the prediction by owner and phase, and a table of the stages.
std::string to_text(const RunPlan& plan);

}  // namespace headroom
