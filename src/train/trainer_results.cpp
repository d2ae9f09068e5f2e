// What a run comes to: evaluation, and the figures over all ranks.
#include "train/trainer_state.h"

#include <headroom/core/error.h>
#include <headroom/data/split.h>
#include "core/hash.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

namespace headroom {
namespace {

// Sums over the evaluation data, as ranks send them to each other.
struct EvalSums {
  double loss = 0.0;
  std::int64_t num_items = 0;
  std::int64_t num_samples = 0;
  std::int64_t count_correct = 0;
  std::int64_t counts_answers = 0;
};

// Figures of one rank's run.
struct RankFigures {
  std::int64_t peak_bytes = 0;
  std::int64_t resident_bytes = 0;
  std::int64_t num_forwards = 0;
  std::int64_t num_recomputes = 0;
  std::array<std::int64_t, kNumOwners> peak_by_owner{};
};

template <typename Plain>
std::vector<Plain> gather_all(Communicator& comm, const Plain& mine) {
  std::vector<Plain> result;
  for (const std::string& bytes :
       comm.gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
    result.emplace_back();
    std::memcpy(&result.back(), bytes.data(), sizeof(Plain));
  }
  return result;
}

}  // namespace

EvalResults Trainer::State::evaluate() {
  if (!eval_data) throw ConfigError("there is no evaluation data");
  const torch::NoGradGuard no_grad;
  chain.train(false);
  // As many samples at once as in training: what fits there fits here.
  const std::int64_t batch = smallest_micro_batch();
  const Share share = share_of(eval_data->size(), comm->rank(), comm->size());
  EvalSums mine;
  for (std::int64_t first = share.begin; first < share.end; first += batch) {
    std::vector<std::int64_t> indices;
    for (std::int64_t i = first; i < std::min(first + batch, share.end); ++i) indices.push_back(i);
    MicroBatch micro;
    {
      const OwnerScope owner(Owner::kInputs);
      micro = eval_data->load(indices);
    }
    const std::vector<at::Tensor> outputs = executor->evaluate(micro);
    mine.loss += outputs.at(0).item<double>();
    if (outputs.size() > 1) {
      mine.count_correct += outputs[1].item<std::int64_t>();
      mine.counts_answers = 1;
    }
    mine.num_items += micro.num_items;
    mine.num_samples += micro.num_samples;
  }
  chain.train(true);
  EvalSums all;
  for (const EvalSums& one : gather_all(*comm, mine)) {
    all.loss += one.loss;
    all.num_items += one.num_items;
    all.num_samples += one.num_samples;
    all.count_correct += one.count_correct;
    all.counts_answers = std::max(all.counts_answers, one.counts_answers);
  }
  EvalResults results;
  results.num_samples = all.num_samples;
  results.loss = all.loss / static_cast<double>(std::max<std::int64_t>(all.num_items, 1));
  if (all.counts_answers != 0)
    results.accuracy =
        static_cast<double>(all.count_correct) / static_cast<double>(all.num_samples);
  return results;
}

TrainResults Trainer::State::results(const RunLog& log, double epochs) {
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
  results.memory_budget_bytes = arguments.memory_budget_bytes;
  results.predicted_peak_bytes = predicted_peak_bytes();
  results.predicted_step_seconds = plan.predicted_step_seconds;
  results.measured_step_seconds = log.median_update_seconds();
  results.micro_batch_size = plan.micro_batch;
  const std::int64_t samples = share_of(std::min(window_batch(), train_data->size()), 0, num_ranks)
                                   .end;  // rank 0's share is the largest
  results.gradient_accumulation_steps =
      static_cast<std::int64_t>(balanced_sizes(samples, plan.micro_batch).size());
  results.world_size = comm->size();
  results.num_skipped_updates = position.num_skipped_updates;
  results.num_recoveries = num_recoveries;
  results.num_plans = num_plans;
  results.num_parameters = chain.num_parameters();
  results.weights_sha256 = weights_sha256(chain);
  merge_over_ranks(results);
  return results;
}

void Trainer::State::merge_over_ranks(TrainResults& results) {
  const MemoryUse use = MemoryMeter::instance().use();
  RankFigures most{use.peak_bytes, peak_resident_bytes(), 0, 0, use.peak_by_owner};
  const RankFigures mine{use.peak_bytes, peak_resident_bytes(), work.num_forwards,
                         work.num_recomputes, use.peak_by_owner};
  for (const RankFigures& one : gather_all(*comm, mine)) {
    most.peak_bytes = std::max(most.peak_bytes, one.peak_bytes);
    most.resident_bytes = std::max(most.resident_bytes, one.resident_bytes);
    most.num_forwards += one.num_forwards;
    most.num_recomputes += one.num_recomputes;
    for (std::size_t owner = 0; owner < kNumOwners; ++owner) {
      most.peak_by_owner[owner] = std::max(most.peak_by_owner[owner], one.peak_by_owner[owner]);
    }
  }
  results.peak_memory_bytes = most.peak_bytes;
  results.peak_rss_bytes = most.resident_bytes;
  results.peak_activation_bytes = most.peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
  for (std::size_t owner = 0; owner < kNumOwners; ++owner) {
    results.peak_bytes_by_owner[owner_name(static_cast<Owner>(owner))] = most.peak_by_owner[owner];
  }
  const std::int64_t first_forwards = most.num_forwards - most.num_recomputes;
  results.recomputed_forward_fraction =
      first_forwards > 0
          ? static_cast<double>(most.num_recomputes) / static_cast<double>(first_forwards)
          : 0.0;
}

std::string weights_sha256(const Chain& chain) {
  Sha256 hash;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    hash.update(bytes.data_ptr(), bytes.nbytes());
  };
  for (const auto& [name, tensor] : chain.named_parameters()) add(tensor);
  for (const auto& [name, tensor] : chain.named_buffers()) add(tensor);
  return hash.hex_digest();
}

}  // namespace headroom
