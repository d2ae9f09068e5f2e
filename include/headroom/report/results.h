#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace headroom {

class Json;

struct EvalResults {
  double loss = 0.0;
  std::optional<double> accuracy;    ///< share of right answers, 0 to 1; nothing for models that do
                                     ///< not count them, such as language models
  std::optional<double> f1;          ///< of classifiers: of the second of two classes, or the mean
                                     ///< over more of them
  std::optional<double> perplexity;  ///< of language models: e^loss
  std::int64_t num_samples = 0;
};

/// What a training run came to: the contents of train_results.json.
struct TrainResults {
  double train_runtime = 0.0;  ///< seconds
  double train_samples_per_second = 0.0;
  double train_steps_per_second = 0.0;
  double train_loss = 0.0;  ///< mean over the updates of this run
  double final_loss = 0.0;  ///< loss of the last global batch
  double epoch = 0.0;
  std::int64_t global_step = 0;
  std::optional<EvalResults> eval;

  std::int64_t peak_memory_bytes = 0;  ///< most bytes of tensors at once
  std::int64_t peak_activation_bytes = 0;
  std::int64_t peak_rss_bytes = 0;
  std::int64_t memory_budget_bytes = 0;   ///< 0: none
  std::int64_t predicted_peak_bytes = 0;  ///< 0: not predicted
  double predicted_step_seconds = 0.0;
  double measured_step_seconds = 0.0;  ///< median of an update
  std::int64_t micro_batch_size = 0;
  std::int64_t gradient_accumulation_steps = 0;
  std::int64_t world_size = 1;
  double recomputed_forward_fraction =
      0.0;  ///< forwards of stages beyond the first, over first ones
  std::map<std::string, std::int64_t> peak_bytes_by_owner;
  std::int64_t num_skipped_updates = 0;
  std::int64_t num_recoveries = 0;  ///< times that memory ran out and the step was planned anew
  std::int64_t num_plans = 0;  ///< made in this run: one for each bucket of shapes, and one for
                               ///< each time that a plan was made anew
  double data_wait_fraction = 0.0;    ///< of the run's time, in which training waited for samples
  std::optional<double> best_metric;  ///< of --metric_for_best_model, where evaluations were made
  std::string best_model_checkpoint;  ///< the folder with its weights; empty: they were not kept
  std::int64_t num_parameters = 0;
  std::string weights_sha256;
  std::string model_sha256;  ///< of the file with the saved weights; empty: none was saved
};

Json to_json(const TrainResults& results);

}  // namespace headroom
