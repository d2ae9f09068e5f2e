#pragma once

// A small problem, and the plain loop that the trainer's numbers are compared with.

#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/train/trainer.h>

#include "support/idx_files.h"

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace headroom::testing {

/// Rows of a table with a class each.
class TableData final : public Dataset {
 public:
  TableData(std::int64_t size, std::int64_t width, std::int64_t classes, std::uint64_t seed) {
    seed_everything(seed);
    rows = torch::randn({size, width});
    labels = torch::randint(classes, {size}, torch::kLong);
  }

  std::int64_t size() const override { return rows.size(0); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    if (on_load) on_load(indices);
    const at::Tensor chosen = torch::tensor(indices, torch::kLong);
    const auto count = static_cast<std::int64_t>(indices.size());
    return {{rows.index_select(0, chosen)}, {labels.index_select(0, chosen)}, count, count};
  }

  at::Tensor rows;    // (N, width)
  at::Tensor labels;  // (N)
  std::function<void(c10::ArrayRef<std::int64_t>)> on_load;
};

inline constexpr std::int64_t kWidth = 6;
inline constexpr std::int64_t kClasses = 3;
inline constexpr std::int64_t kSamples = 21;  // no multiple of the windows of the tests

inline std::shared_ptr<TableData> make_data(std::int64_t size = kSamples) {
  return std::make_shared<TableData>(size, kWidth, kClasses, 11);
}

/// With dropout and BatchNorm, so that random state and buffers matter.
inline torch::nn::Sequential make_noisy_network(std::uint64_t seed) {
  seed_everything(seed);
  return torch::nn::Sequential(torch::nn::Linear(kWidth, 16), torch::nn::BatchNorm1d(16),
                               torch::nn::ReLU(), torch::nn::Dropout(0.3),
                               torch::nn::Linear(16, kClasses));
}

inline torch::nn::Sequential make_plain_network(std::uint64_t seed) {
  seed_everything(seed);
  return torch::nn::Sequential(torch::nn::Linear(kWidth, 16), torch::nn::Tanh(),
                               torch::nn::Linear(16, kClasses));
}

inline Chain chain_of(const torch::nn::Sequential& network) {
  return Chain::from_sequential(network.ptr(), summed_cross_entropy);
}

/// Sequential order, plain SGD, no clipping, every update logged, nothing shown.
inline TrainingArguments plain_arguments(const std::string& output_dir) {
  TrainingArguments arguments;
  arguments.output_dir = output_dir;
  arguments.shuffle = false;
  arguments.optim = "sgd";
  arguments.learning_rate = 0.1;
  arguments.lr_scheduler_type = "constant";
  arguments.max_grad_norm = 0;
  arguments.num_train_epochs = 2;
  arguments.per_device_train_batch_size = 8;
  arguments.logging_steps = 1;
  arguments.disable_tqdm = true;
  return arguments;
}

inline std::vector<nlohmann::json> metrics_of(const std::string& output_dir) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(output_dir + "/metrics.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

/// One update of plain SGD on the mean loss of `samples`, all at once. Returns the loss, and the
/// norm of the gradient when asked.
inline double plain_update(torch::nn::Sequential& network, const TableData& data,
                           const std::vector<std::int64_t>& samples, double learning_rate,
                           double* norm = nullptr) {
  const MicroBatch batch = data.load(samples);
  for (at::Tensor& parameter : network->parameters()) parameter.mutable_grad() = at::Tensor();
  const at::Tensor loss =
      torch::nn::functional::cross_entropy(network->forward(batch.inputs[0]), batch.targets[0]);
  loss.backward();
  const torch::NoGradGuard no_grad;
  double squares = 0.0;
  for (at::Tensor& parameter : network->parameters()) {
    squares += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    parameter.sub_(parameter.grad(), learning_rate);
  }
  if (norm != nullptr) *norm = std::sqrt(squares);
  return loss.item<double>();
}

inline std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = begin; i < end; ++i) values.push_back(i);
  return values;
}

/// Windows of `size` over the samples in order, `epochs` times; the last one of an epoch may be
/// smaller.
inline std::vector<std::vector<std::int64_t>> plain_windows(std::int64_t num_samples,
                                                            std::int64_t size, int epochs) {
  std::vector<std::vector<std::int64_t>> windows;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::int64_t first = 0; first < num_samples; first += size)
      windows.push_back(range(first, std::min(first + size, num_samples)));
  }
  return windows;
}

inline void expect_close(const torch::nn::Sequential& ours, const torch::nn::Sequential& theirs,
                         double tolerance) {
  const auto a = ours->parameters();
  const auto b = theirs->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), tolerance) << "parameter " << i;
  }
}

}  // namespace headroom::testing
