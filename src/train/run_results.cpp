#include "train/run_results.h"

#include <headroom/memory/meter.h>
#include <headroom/train/trainer.h>
#include "core/hash.h"
#include "core/tensor_hash.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>

namespace headroom {
namespace {

// Figures of one rank's run, as ranks send them to each other.
struct RankFigures {
  std::int64_t peak_bytes = 0;
  std::int64_t resident_bytes = 0;
  std::int64_t num_forwards = 0;
  std::int64_t num_recomputes = 0;
  std::array<std::int64_t, kNumOwners> peak_by_owner{};
};

RankFigures over_ranks(const RankGroup& ranks, const RankFigures& mine) {
  RankFigures all;
  for (const RankFigures& one : ranks.gather(mine)) {
    all.peak_bytes = std::max(all.peak_bytes, one.peak_bytes);
    all.resident_bytes = std::max(all.resident_bytes, one.resident_bytes);
    all.num_forwards += one.num_forwards;
    all.num_recomputes += one.num_recomputes;
    for (std::size_t owner = 0; owner < kNumOwners; ++owner)
      all.peak_by_owner[owner] = std::max(all.peak_by_owner[owner], one.peak_by_owner[owner]);
  }
  return all;
}

void set_figures(TrainResults& results, const RankFigures& all) {
  results.peak_memory_bytes = all.peak_bytes;
  results.peak_rss_bytes = all.resident_bytes;
  results.peak_activation_bytes = all.peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
  for (std::size_t owner = 0; owner < kNumOwners; ++owner)
    results.peak_bytes_by_owner[owner_name(static_cast<Owner>(owner))] = all.peak_by_owner[owner];
  const std::int64_t first_forwards = all.num_forwards - all.num_recomputes;
  results.recomputed_forward_fraction =
      first_forwards > 0
          ? static_cast<double>(all.num_recomputes) / static_cast<double>(first_forwards)
          : 0.0;
}

}  // namespace

TrainResults results_of(const RunSettings& settings, const Chain& chain, const RankGroup& ranks,
                        const RunPlanner& planner, const UpdateStep& step, const RunLog& log,
                        const TrainingPosition& position, double epochs) {
  const double runtime = std::max(log.seconds(), 1e-9);
  TrainResults results;
  results.train_runtime = runtime;
  results.train_samples_per_second = static_cast<double>(log.num_samples()) / runtime;
  results.train_steps_per_second =
      static_cast<double>(position.global_step - log.first_step()) / runtime;
  const std::int64_t num_applied = position.global_step - position.num_skipped_updates;
  results.train_loss = num_applied > 0 ? position.loss_sum / static_cast<double>(num_applied) : 0.0;
  results.final_loss = log.last_loss();
  results.epoch = epochs;
  results.global_step = position.global_step;
  results.memory_budget_bytes = settings.arguments.memory_budget_bytes;
  const RunPlan& plan = planner.plan();
  results.predicted_peak_bytes = planner.predicted_peak_bytes();
  results.predicted_step_seconds = plan.predicted_step_seconds;
  results.measured_step_seconds = log.median_update_seconds();
  if (planner.num_plans() > 0) {
    results.micro_batch_size = plan.micro_batch();
    results.gradient_accumulation_steps = plan.num_micro_batches();
  }
  results.data_wait_fraction = step.data_wait_seconds() / runtime;
  results.world_size = ranks.size();
  results.num_skipped_updates = position.num_skipped_updates;
  results.num_recoveries = planner.num_recoveries();
  results.num_plans = planner.num_plans();
  results.num_parameters = chain.num_parameters();
  results.weights_sha256 = weights_sha256(chain);
  const MemoryUse& peaks = step.peaks();
  set_figures(results,
              over_ranks(ranks, {peaks.peak_bytes, peak_resident_bytes(), step.work().num_forwards,
                                 step.work().num_recomputes, peaks.peak_by_owner}));
  return results;
}

std::string weights_sha256(const Chain& chain) {
  Sha256 hash;
  for (const at::Tensor& tensor : weights_of(chain)) add_values(hash, tensor);
  return hash.hex_digest();
}

}  // namespace headroom
