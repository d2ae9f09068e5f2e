#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/data/micro_batch.h>
#include <headroom/model/chain.h>
#include <headroom/plan/plan.h>
#include <headroom/report/json.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace headroom {

/// What a plan for training is asked to do.
struct PlanningRequest {
  std::int64_t global_batch = 1;       ///< samples of an update
  std::int64_t fixed_micro_batch = 0;  ///< 0: the planner chooses, up to max_micro_batch
  std::int64_t max_micro_batch = 1;
  std::int64_t budget_bytes = 0;       ///< 0: none
  std::string policy;                  ///< --gradient_checkpointing; empty: keep everything, or optimal when there is a budget
  bool prefetches = false;             ///< one more micro-batch is in memory
  std::int64_t pending_bytes = 0;      ///< that will be allocated before training starts: the optimizer's state
  std::string cache_file;              ///< where measured costs are kept between runs; empty: nowhere
  std::string cache_key;               ///< what they depend on: model, sizes, device, threads, version
  std::function<MicroBatch(std::int64_t num_samples)> load;  ///< a micro-batch to measure with
};

/// How a run will be trained: the split of the global batch, the operations of one micro-batch, and what they are predicted to cost.
struct TrainingPlan {
  std::int64_t global_batch = 1;
  std::int64_t micro_batch = 1;        ///< the largest of the micro-batches
  std::int64_t num_micro_batches = 1;  ///< of a full window
  std::vector<Operation> operations;

  bool is_measured = false;                   ///< false: nothing was asked for that needs a prediction, and the rest is empty
  std::int64_t budget_bytes = 0;
  std::int64_t predicted_peak_bytes = 0;
  double predicted_step_seconds = 0.0;
  std::map<std::string, std::int64_t> static_bytes;  ///< by owner: weights, gradients, optimizer, inputs, other
  std::map<std::string, std::int64_t> phase_peaks;   ///< forward, backward, update
  Plan schedule;                              ///< of one micro-batch
  ChainCosts costs;                           ///< that the schedule was made for
  double profile_seconds = 0.0;
};

/// Measures the chain as far as needed and plans. Throws BudgetError, with the floor's parts and the remedies, when nothing fits.
TrainingPlan plan_training(const PlanningRequest& request, const Chain& chain);

Json to_json(const TrainingPlan& plan);

/// The plan for people: the split, the prediction by owner and phase, and a table of the stages.
std::string to_text(const TrainingPlan& plan);

}  // namespace headroom
