// A loss over embeddings of the whole batch, carried out in micro-batches: random chains, losses,
// batches and splits.
#include "execute/contrastive_executor.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/chain.h>

#include "execute/largest_difference.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace headroom {
namespace {

using testing::largest_difference;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kInputs = 6;

// Compares the embeddings by one of several losses, with a parameter of its own.
class LossStage final : public Stage, public EmbeddingLoss {
 public:
  LossStage(int kind, torch::ScalarType type)
      : Stage("loss"),
        kind_(kind),
        scale_(module_->register_parameter("scale", torch::full({}, 0.4, type))) {}

  Tensors forward(const Tensors& e, const MicroBatch& micro, int /*option*/) override {
    const at::Tensor scores = torch::mm(e.at(0), e.at(1).t()) * scale_.exp();  // (B, B)
    const at::Tensor matches = torch::arange(micro.num_samples, torch::kLong);
    if (kind_ == 0) {
      return {(torch::log_softmax(scores, 1) + torch::log_softmax(scores, 0)).diag().sum() / -2};
    }
    if (kind_ == 1) {  // every pair by itself
      const at::Tensor signs = 2 * torch::eye(scores.size(0), scores.options()) - 1;
      return {-torch::log_sigmoid(signs * scores).sum()};
    }
    return {(torch::cdist(e[0], e[1]) * scale_).square().sum()};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool couples_samples() const override { return true; }

 private:
  struct Owner : torch::nn::Module {
    using torch::nn::Module::register_parameter;
  };
  int kind_;
  std::shared_ptr<Owner> module_ = std::make_shared<Owner>();
  at::Tensor scale_;
};

struct ChainCase {
  std::int64_t width = 5;
  int depth = 1;
  double dropout = 0.0;
  int loss = 0;
  torch::ScalarType type = torch::kFloat;
};

// Two towers that the stages carry side by side.
Chain make_chain(const ChainCase& given, std::uint64_t seed) {
  seed_everything(seed);
  Chain chain;
  for (int i = 0; i <= given.depth; ++i) {
    torch::nn::Sequential parts;
    for (int side = 0; side < 2; ++side)
      parts->push_back(torch::nn::Linear(i == 0 ? kInputs : given.width, given.width));
    parts->to(given.type);
    chain.add("layer" + std::to_string(i), parts.ptr(),
              [parts, dropout = given.dropout](const Tensors& x, const MicroBatch&) -> Tensors {
                Tensors outputs;
                for (std::size_t side = 0; side < 2; ++side) {
                  const auto linear = parts->ptr<torch::nn::LinearImpl>(side);
                  outputs.push_back(
                      torch::dropout(torch::tanh(linear->forward(x.at(side))), dropout, true));
                }
                return outputs;
              });
  }
  chain.add(std::make_shared<LossStage>(given.loss, given.type));
  return chain;
}

MicroBatch make_batch(std::int64_t num_samples, torch::ScalarType type) {
  return {{torch::randn({num_samples, kInputs}, type), torch::randn({num_samples, kInputs}, type)},
          {},
          num_samples,
          num_samples};
}

struct BatchOutcome {
  double loss = 0;
  Tensors gradients;
};

Tensors take_gradients(const Chain& chain) {
  Tensors gradients;
  for (at::Tensor& parameter : chain.parameters()) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

std::vector<Operation> recompute_everything(std::size_t num_stages) {
  std::vector<Operation> operations;
  const auto last = static_cast<int>(num_stages) - 1;
  for (int stage = 0; stage < last; ++stage)
    operations.push_back({OperationKind::kForward, stage, 0, 0});
  for (int stage = last; stage >= 0; --stage) {
    if (stage < last) {
      for (int again = 0; again < stage; ++again)
        operations.push_back({OperationKind::kForward, again, 0, 0});
    }
    operations.push_back({OperationKind::kForwardKeep, stage, 0, 0});
    operations.push_back({OperationKind::kBackward, stage, 0, 0});
    if (stage > 0) operations.push_back({OperationKind::kFree, stage, 0, 0});
  }
  return operations;
}

BatchOutcome run_in_parts(const Chain& chain, const MicroBatch& batch, std::int64_t micro_batch,
                          const std::vector<Operation>& operations) {
  ContrastiveExecutor executor(chain, {});
  const std::vector<MicroBatch> parts = split(batch, micro_batch);
  executor.begin(batch.num_samples, 0);
  for (const MicroBatch& part : parts) executor.embed(part);
  BatchOutcome outcome;
  outcome.loss = executor.run_loss(1.0 / static_cast<double>(batch.num_samples), true);
  for (const MicroBatch& part : parts) executor.accumulate(part, operations);
  outcome.gradients = take_gradients(chain);
  return outcome;
}

BatchOutcome run_whole(const Chain& chain, const MicroBatch& batch) {
  Executor executor(chain);
  BatchOutcome outcome;
  outcome.loss = executor
                     .accumulate(batch, keep_everything(chain.size()),
                                 1.0 / static_cast<double>(batch.num_samples))
                     .loss_sum;
  outcome.gradients = take_gradients(chain);
  return outcome;
}

TEST(ContrastiveExecutor, GivesTheGradientOfTheWholeBatchForRandomChainsLossesAndSplits) {
  std::mt19937_64 random(11);
  const auto number = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int i = 0; i < 60; ++i) {
    ChainCase given;
    given.width = number(1, 9);
    given.depth = static_cast<int>(number(0, 3));
    given.loss = static_cast<int>(number(0, 2));
    given.type = i % 2 == 0 ? torch::kDouble : torch::kFloat;
    const Chain chain = make_chain(given, 100 + i);
    const MicroBatch batch = make_batch(number(2, 30), given.type);
    const BatchOutcome whole = run_whole(chain, batch);
    const BatchOutcome parts =
        run_in_parts(chain, batch, number(1, 9), keep_everything(chain.size()));
    const double tolerance = given.type == torch::kDouble ? 1e-9 : 1e-4;
    EXPECT_NEAR(parts.loss, whole.loss, tolerance * std::abs(whole.loss)) << "case " << i;
    EXPECT_LE(largest_difference(parts.gradients, whole.gradients), tolerance) << "case " << i;
  }
}

TEST(ContrastiveExecutor, EveryScheduleGivesTheSameBitsAndRandomNumbersMoveOnOnce) {
  ChainCase given;
  given.depth = 3;
  given.dropout = 0.3;
  const Chain chain = make_chain(given, 3);
  const MicroBatch batch = make_batch(13, torch::kFloat);
  const auto run = [&](const std::vector<Operation>& operations) {
    seed_everything(9);
    BatchOutcome outcome = run_in_parts(chain, batch, 4, operations);
    outcome.gradients.push_back(cpu_random_state());
    return outcome;
  };
  const BatchOutcome kept = run(keep_everything(chain.size())),
                     recomputed = run(recompute_everything(chain.size()));
  EXPECT_EQ(kept.loss, recomputed.loss);
  for (std::size_t i = 0; i < kept.gradients.size(); ++i)
    EXPECT_TRUE(kept.gradients[i].equal(recomputed.gradients[i])) << i;
}

TEST(ContrastiveExecutor, RanksWithSharesOfTheBatchAddUpToIt) {
  const Chain chain = make_chain({}, 4);
  const MicroBatch batch = make_batch(10, torch::kFloat);
  const BatchOutcome whole = run_whole(chain, batch);
  const std::vector<MicroBatch> shares = split(batch, 5);
  std::vector<std::unique_ptr<ContrastiveExecutor>> ranks;
  Tensors sums;
  for (std::int64_t rank = 0; rank < 3; ++rank) {  // the last one has no sample
    ranks.push_back(std::make_unique<ContrastiveExecutor>(chain, ExecutorOptions{}));
    ranks.back()->begin(10, std::min<std::int64_t>(10, 5 * rank));
    if (rank < 2) {
      ranks.back()->embed(shares[static_cast<std::size_t>(rank)]);
    } else {
      ranks.back()->make_room(shares[0]);
    }
    const Tensors& mine = ranks.back()->embeddings();
    for (std::size_t i = 0; i < mine.size(); ++i)
      rank == 0 ? sums.push_back(mine[i].clone()) : void(sums[i].add_(mine[i]));
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < sums.size(); ++i)
      at::Tensor(ranks[rank]->embeddings()[i]).copy_(sums[i]);
    EXPECT_NEAR(ranks[rank]->run_loss(0.1, rank == 0), whole.loss, 1e-5 * std::abs(whole.loss));
    if (rank < 2) ranks[rank]->accumulate(shares[rank], keep_everything(chain.size()));
  }
  EXPECT_LE(largest_difference(take_gradients(chain), whole.gradients), 1e-5);
}

TEST(ContrastiveExecutor, RefusesEmbeddingsThatAreNotWhatTheyWere) {
  Chain chain = make_chain({}, 5);
  const MicroBatch batch = make_batch(6, torch::kFloat);
  ContrastiveExecutor executor(chain, {});
  executor.begin(6, 0);
  executor.embed(batch);
  executor.run_loss(1.0, true);
  MicroBatch other = batch;
  other.inputs[0] = batch.inputs[0] + 1;
  EXPECT_THROW(executor.accumulate(other, keep_everything(chain.size())), Error);
  EXPECT_THROW(
      ContrastiveExecutor(
          Chain(chain).add("more", nullptr, [](const Tensors& x, const MicroBatch&) { return x; }),
          {}),
      ConfigError);
}

TEST(ContrastiveExecutor, TheMeasuredLossTakesTheBytesOfTheRealOne) {
  ChainCase given;
  given.width = 64;
  const Chain chain = make_chain(given, 6);
  const MicroBatch batch = make_batch(96, torch::kFloat);
  MemoryMeter& meter = MemoryMeter::instance();
  const ContrastiveLossCosts costs =
      measure_contrastive_loss(chain, {}, split(batch, 1).front(), batch.num_samples);
  ContrastiveExecutor executor(chain, {});
  executor.begin(batch.num_samples, 0);
  const std::int64_t before = meter.live_bytes();
  for (const MicroBatch& part : split(batch, 8)) executor.embed(part);
  EXPECT_EQ(meter.live_bytes() - before, costs.embedding_bytes);
  meter.reset_peak();
  executor.run_loss(1.0, true);
  EXPECT_EQ(meter.peak_bytes() - before, costs.peak_bytes);
  take_gradients(chain);
  EXPECT_EQ(meter.live_bytes() - before, costs.gradient_bytes);
}

}  // namespace
}  // namespace headroom
