#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/plan/plan.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class Json;

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

  /// What to do with a micro-batch of `num_samples`, which is at most micro_batch.
  const std::vector<Operation>& operations_for(std::int64_t num_samples) const;
};

Json to_json(const RunPlan& plan);

/// The plan for people: the split, the prediction by owner and phase, and a table of the stages.
std::string to_text(const RunPlan& plan);

}  // namespace headroom
