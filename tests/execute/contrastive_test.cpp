// The gradient of a loss over the whole batch, from micro-batches: random embeddings and losses.
#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/contrastive.h>
#include <headroom/memory/meter.h>

#include "comm/rank_threads.h"
#include "execute/largest_difference.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <mutex>
#include <random>

namespace headroom {
namespace {

using testing::largest_difference;
using Tensors = std::vector<at::Tensor>;

/// Two towers and a temperature, as in CLIP.
struct TowersImpl : torch::nn::Module {
  TowersImpl(std::int64_t width, std::int64_t depth, double dropout, torch::ScalarType type) {
    for (const char* side : {"left", "right"}) {
      torch::nn::Sequential tower(torch::nn::Linear(6, width));
      for (std::int64_t i = 0; i < depth; ++i) {
        tower->push_back(torch::nn::Tanh());
        tower->push_back(torch::nn::Dropout(dropout));
        tower->push_back(torch::nn::Linear(width, width));
      }
      towers.push_back(register_module(side, tower));
    }
    scale = register_parameter("scale", torch::full({}, 0.7));
    to(type);
  }

  Tensors embed(const MicroBatch& micro) {
    return {towers[0]->forward(micro.inputs[0]), towers[1]->forward(micro.inputs[1])};
  }

  std::vector<torch::nn::Sequential> towers;
  torch::Tensor scale;
};
TORCH_MODULE(Towers);

/// Losses that compare every sample with every other one.
at::Tensor contrastive_loss(int kind, const Tensors& e, const at::Tensor& scale) {
  const auto unit = [](const at::Tensor& x) { return x / x.norm(2, {1}, true); };
  const at::Tensor scores = torch::mm(unit(e[0]), unit(e[1]).t()) * scale.exp();  // (B, B)
  const at::Tensor matches = torch::arange(scores.size(0), torch::kLong);
  if (kind == 0) {
    return (torch::cross_entropy_loss(scores, matches) +
            torch::cross_entropy_loss(scores.t(), matches)) /
           2;
  }
  if (kind == 1) {  // SigLIP's pairwise sigmoid
    const at::Tensor signs = 2 * torch::eye(scores.size(0), scores.options()) - 1;
    return -torch::log_sigmoid(signs * scores).sum() / scores.size(0);
  }
  return (torch::cdist(e[0], e[1]) * scale).pow(2).mean() - (e[0] - e[1]).pow(2).mean();
}

MicroBatch make_pairs(std::int64_t num_samples, torch::ScalarType type) {
  MicroBatch batch;
  batch.inputs = {torch::randn({num_samples, 6}, type), torch::randn({num_samples, 6}, type)};
  batch.num_samples = num_samples;
  return batch;
}

/// Trains on each batch in micro-batches and returns the weights and the last report.
std::pair<Tensors, WindowReport> train(Towers model, int kind,
                                       const std::vector<MicroBatch>& batches,
                                       std::int64_t max_micro_batch,
                                       ContrastiveOptions options = {}) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  ContrastiveAccumulator accumulator(
      optimizer, *model, [&](const MicroBatch& micro) { return model->embed(micro); },
      [&](const Tensors& e) { return contrastive_loss(kind, e, model->scale); }, options);
  WindowReport report;
  for (const MicroBatch& batch : batches)
    report = accumulator.update(split(batch, max_micro_batch));
  Tensors weights;
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
    weights.push_back(parameter.detach().clone());
  }
  return {weights, report};
}

/// The same training as an ordinary loop on the whole batch.
Tensors train_whole(Towers model, int kind, const std::vector<MicroBatch>& batches,
                    double max_norm) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const MicroBatch& batch : batches) {
    optimizer.zero_grad();
    contrastive_loss(kind, model->embed(batch), model->scale).backward();
    if (max_norm > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), max_norm);
    optimizer.step();
  }
  Tensors weights;
  for (const at::Tensor& parameter : model->parameters())
    weights.push_back(parameter.detach().clone());
  return weights;
}

Towers make_towers(std::uint64_t seed, std::int64_t width, std::int64_t depth, double dropout,
                   torch::ScalarType type) {
  torch::manual_seed(seed);
  return Towers(width, depth, dropout, type);
}

TEST(Contrastive, EqualsTheWholeBatchForRandomModelsLossesAndSplits) {
  std::mt19937_64 random(5);
  const auto number = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int i = 0; i < 60; ++i) {
    const auto type = i % 2 == 0 ? torch::kDouble : torch::kFloat;
    const std::int64_t width = number(1, 9), depth = number(0, 2), micro = number(1, 9);
    const int kind = static_cast<int>(number(0, 2));
    const double max_norm = i % 3 == 0 ? 0.05 : 0.0;
    torch::manual_seed(100 + i);
    std::vector<MicroBatch> batches;
    for (int update = 0; update < 3; ++update) batches.push_back(make_pairs(number(2, 20), type));
    ContrastiveOptions options;
    options.max_grad_norm = max_norm;
    const auto [ours, report] =
        train(make_towers(i, width, depth, 0.0, type), kind, batches, micro, options);
    const Tensors whole =
        train_whole(make_towers(i, width, depth, 0.0, type), kind, batches, max_norm);
    EXPECT_LE(largest_difference(ours, whole), type == torch::kDouble ? 1e-9 : 1e-4)
        << "case " << i;
    EXPECT_EQ(report.items, batches.back().num_samples);
  }
}

TEST(Contrastive, DropoutIsReplayedAndTheRandomStateMovesOnOnce) {
  const std::vector<MicroBatch> batches = {make_pairs(12, torch::kFloat)};
  const auto run = [&](std::int64_t micro) {
    Towers model = make_towers(3, 8, 2, 0.3, torch::kFloat);
    torch::manual_seed(9);
    Tensors weights = train(model, 0, batches, micro).first;
    weights.push_back(torch::rand({4}));  // what the random state has become
    return weights;
  };
  const Tensors first = run(4), again = run(4);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], again[i]));
  // One micro-batch is the whole batch: the same masks as an ordinary loop.
  Towers model = make_towers(3, 8, 2, 0.3, torch::kFloat);
  torch::manual_seed(9);
  Tensors whole = train_whole(model, 0, batches, 0);
  whole.push_back(torch::rand({4}));
  EXPECT_LE(largest_difference(run(12), whole), 1e-5);
}

TEST(Contrastive, ActivationsAreThoseOfOneMicroBatch) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::vector<MicroBatch> batches = {make_pairs(128, torch::kFloat)};
  const auto peak = [&](std::int64_t micro) {
    Towers model = make_towers(1, 32, 48, 0.0, torch::kFloat);
    const std::int64_t before = meter.live_bytes();
    meter.reset_peak();
    train(model, 1, batches, micro);
    return meter.peak_bytes() - before;
  };
  EXPECT_LT(peak(4), peak(128) / 2);
}

TEST(Contrastive, RanksCompareTheirEmbeddingsWithEachOther) {
  const MicroBatch batch = make_pairs(14, torch::kDouble);
  const Tensors whole = train_whole(make_towers(8, 5, 1, 0.0, torch::kDouble), 0, {batch}, 0);
  std::vector<Tensors> weights(3);
  std::vector<Towers> models;
  for (int rank = 0; rank < 3; ++rank) models.push_back(make_towers(8, 5, 1, 0.0, torch::kDouble));
  const std::vector<MicroBatch> shares = split(batch, 5);  // 5, 5, 4
  const auto errors = testing::run_ranks(3, [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    ContrastiveOptions options;
    options.communicator = &comm;
    const auto [trained, report] = train(models[rank], 0, {shares[rank]}, 2, options);
    weights[rank] = trained;
    EXPECT_EQ(report.items, 14);
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << testing::message_of<Error>(error);
  for (const Tensors& ours : weights) {
    ASSERT_EQ(ours.size(), whole.size());
    EXPECT_LE(largest_difference(ours, whole), 1e-9);
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(torch::equal(ours[i], weights[0][i]));
  }
}

TEST(Contrastive, RefusesWhatWouldBeAnotherGradient) {
  Towers model = make_towers(1, 4, 0, 0.0, torch::kFloat);
  torch::nn::Sequential with_norm(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto embed = [&](const MicroBatch& micro) { return model->embed(micro); };
  const auto loss = [&](const Tensors& e) { return contrastive_loss(0, e, model->scale); };
  EXPECT_THROW(ContrastiveAccumulator(optimizer, *with_norm, embed, loss), ConfigError);
  with_norm->eval();
  EXPECT_NO_THROW(ContrastiveAccumulator(optimizer, *with_norm, embed, loss));

  const std::vector<MicroBatch> window = split(make_pairs(6, torch::kFloat), 2);
  ContrastiveAccumulator good(optimizer, *model, embed, loss);
  EXPECT_THROW(good.update({}), ConfigError);
  int calls = 0;
  ContrastiveAccumulator unsteady(
      optimizer, *model,
      [&](const MicroBatch& micro) {
        Tensors embeddings = model->embed(micro);
        embeddings[0] = embeddings[0] + static_cast<double>(calls++);
        return embeddings;
      },
      loss);
  EXPECT_THROW(unsteady.update(window), Error);
  ContrastiveAccumulator not_one_number(optimizer, *model, embed,
                                        [](const Tensors& e) { return e[0]; });
  EXPECT_THROW(not_one_number.update(window), ConfigError);
  for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Contrastive, AGradientThatIsNotFiniteIsSkipped) {
  Towers model = make_towers(1, 4, 0, 0.0, torch::kFloat);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  bool broken = true;
  ContrastiveAccumulator accumulator(
      optimizer, *model, [&](const MicroBatch& micro) { return model->embed(micro); },
      [&](const Tensors& e) {
        const at::Tensor loss = contrastive_loss(0, e, model->scale);
        return broken ? loss * std::nan("") : loss;
      });
  const std::vector<MicroBatch> window = split(make_pairs(6, torch::kFloat), 2);
  const at::Tensor before = model->parameters()[0].detach().clone();
  EXPECT_FALSE(accumulator.update(window).updated);
  EXPECT_TRUE(torch::equal(model->parameters()[0], before));
  broken = false;
  EXPECT_TRUE(accumulator.update(window).updated);
  EXPECT_EQ(accumulator.num_updates(), 1);
  EXPECT_EQ(accumulator.num_skipped_updates(), 1);
}

}  // namespace
}  // namespace headroom
