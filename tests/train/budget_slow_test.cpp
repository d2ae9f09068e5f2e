// The law and the recovery on deeper nets and at more moments than the fast tests have time for.
#include "train/budget_runs.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace headroom {
namespace {

TEST(DeepNet, TwoHundredResidualBlocksGiveTheSameNumbersAtTwelveBudgets) {
  set_log_quiet(true);
  const RunCase run{"resnet", "blocks=200,width=4,rows=10,columns=10", 8, 4, "adamw"};
  const ScratchFolder folder("deep");
  const BudgetRange range = budget_range(run, folder.path());
  const TrainResults plain = train(run, 0, folder.path());
  for (int i = 0; i < 12; ++i) {
    const std::int64_t budget =
        range.floor_bytes + (range.ample_bytes - range.floor_bytes) * i / 11;
    const TrainResults results = train(run, budget, folder.path());
    SCOPED_TRACE("budget " + std::to_string(budget) + ", predicted " +
                 std::to_string(results.predicted_peak_bytes) + ", measured " +
                 std::to_string(results.peak_memory_bytes));
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
    EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
    EXPECT_LE(static_cast<double>(results.predicted_peak_bytes),
              1.02 * static_cast<double>(results.peak_memory_bytes));
  }
}

// Passes its input on, and lowers the cap at a chosen one of its forwards or backwards, as another
// process would at any moment.
struct Tripwire {
  std::int64_t at = -1;  // counted over forwards and backwards
  std::int64_t cap_bytes = 0;
  std::int64_t count = 0;
  bool has_tripped = false;

  void step() {
    const MemoryUse use = MemoryMeter::instance().use();
    if (use.live_by_owner[static_cast<std::size_t>(Owner::kOptimizer)] == 0)
      return;  // still measuring and planning
    if (count++ == at && !has_tripped) {
      has_tripped = true;
      MemoryMeter::instance().set_cap(cap_bytes);
    }
  }
};

struct TripwireFunction : torch::autograd::Function<TripwireFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t wire) {
    context->saved_data["wire"] = wire;
    reinterpret_cast<Tripwire*>(wire)->step();
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Tripwire*>(context->saved_data["wire"].toInt())->step();
    return {gradients[0], at::Tensor()};
  }
};

// Twelve layers, each of which passes the wire, with dropout so that random state matters.
Chain wired_chain(Tripwire& wire) {
  namespace nn = torch::nn;
  Chain chain;
  for (int i = 0; i < 12; ++i) {
    nn::Linear layer(i == 0 ? 196 : 96, 96);
    chain.add("layer" + std::to_string(i), layer.ptr(),
              [layer, &wire](const auto& x, const auto&) mutable {
                at::Tensor y = torch::relu(layer(x[0].flatten(1)));
                y = torch::dropout(y, 0.1, /*train=*/true);
                return std::vector<at::Tensor>{
                    TripwireFunction::apply(y, reinterpret_cast<std::int64_t>(&wire))};
              });
  }
  nn::Linear head(96, 10);
  chain.add("head", head.ptr(), [head](const auto& x, const MicroBatch& micro) mutable {
    return std::vector<at::Tensor>{summed_cross_entropy({head(x[0])}, micro)};
  });
  return chain;
}

TrainResults train_wired(const TrainingArguments& arguments, Tripwire& wire) {
  MemoryMeter::instance().set_cap(0);
  seed_everything(3);
  const Chain chain = wired_chain(wire);
  const TrainResults results =
      Trainer(arguments, chain, make_synthetic_images(256, 1, 14, 14, 10, 7)).train();
  MemoryMeter::instance().set_cap(0);
  return results;
}

TEST(Recovery, ACapLoweredByThirtyPercentAtFiftyRandomMomentsChangesNothing) {
  set_log_quiet(true);
  const ScratchFolder folder("moments");
  RunCase run{"wired", "", 128, 64, "adamw"};
  Tripwire never;
  const TrainResults plain = train_wired(arguments_of(run, 0, folder.path()), never);
  const std::int64_t budget = plain.peak_memory_bytes + 4096;
  const std::int64_t num_calls = never.count;
  std::mt19937 random(11);
  int num_recovered = 0;
  for (int i = 0; i < 50; ++i) {
    const std::int64_t live_before = MemoryMeter::instance().live_bytes();
    Tripwire wire;
    wire.at = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(num_calls));
    wire.cap_bytes = plain.peak_memory_bytes - (plain.peak_activation_bytes * 3) / 10;
    const TrainResults results = train_wired(arguments_of(run, budget, folder.path()), wire);
    EXPECT_TRUE(wire.has_tripped);
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256)
        << "the cap was lowered at call " << wire.at;
    EXPECT_EQ(results.global_step, plain.global_step);
    num_recovered += results.num_recoveries > 0 ? 1 : 0;
    EXPECT_EQ(MemoryMeter::instance().live_bytes(), live_before) << "a leak";
  }
  EXPECT_GE(num_recovered, 25)
      << "the wire must trip inside of steps for the test to mean something";
}

}  // namespace
}  // namespace headroom
