#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/plan/paging.h>
#include <headroom/plan/search.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class Json;

/// What a run uses: the batch plan of each rank, and what it is predicted to cost.
struct RunPlan {
  std::int64_t global_batch = 1;  ///< over all ranks
  std::int64_t num_ranks = 1;
  BatchPlan batch;  ///< of the largest share of a full window

  PagingPlan paging;  ///< inactive: weights, gradients and optimizer state stay in memory

  bool is_predicted =
      false;  ///< false: nothing was asked for that needs a prediction, and what follows is empty
  std::int64_t budget_bytes = 0;
  double predicted_step_seconds = 0.0;
  std::map<std::string, std::int64_t>
      bytes_by_owner;  ///< weights, gradients, optimizer, inputs, activations, other
  std::string policy;
  ChainCosts costs;                                    ///< of the largest micro-batch
  std::vector<std::vector<std::string>> option_names;  ///< by stage
  double profile_seconds = 0.0;
  /// Times in training over times of stages that are measured one by one; already part of
  /// predicted_step_seconds.
  double time_ratio = 1.0;

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

  std::int64_t micro_batch() const { return batch.largest().size; }
  std::int64_t num_micro_batches() const { return batch.accumulation_steps; }
  std::int64_t predicted_peak_bytes() const { return batch.peak_bytes; }
  /// Each parameter is updated, and its gradient freed, as soon as it is complete.
  bool updates_in_backward() const { return batch.gradients == GradientMode::kUpdatedInBackward; }
};

Json to_json(const RunPlan& plan);

/// The plan for people: the split, the prediction by owner and phase, and a table of the stages.
std::string to_text(const RunPlan& plan);

}  // namespace headroom
