#include "execute/optimizer_in_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "optim/adam.h"
#include "support/transformer.h"

namespace headroom {
namespace {

using testing::clear_gradients;
using testing::SmallGpt;

NamedParameters parameters_of(const torch::nn::Module& module) {
  NamedParameters result;
  for (const auto& item : module.named_parameters()) result.emplace_back(item.key(), item.value());
  return result;
}

/// A model, its optimizer, and windows of micro-batches of random tokens.
struct Training {
  explicit Training(const std::string& optimizer_name) {
    torch::manual_seed(4);
    model = SmallGpt(50, 32, 3, 0.1);
    OptimizerConfig config;
    config.name = optimizer_name;
    config.learning_rate = 1e-2;
    config.weight_decay = 0.1;
    optimizer = make_optimizer(config, parameters_of(*model));
  }

  void micro_batch(int index) {
    torch::manual_seed(100 + index);
    const at::Tensor tokens = torch::randint(50, {2, 12});
    (model->loss(tokens, tokens.roll(1, 1)) / 2).backward();
  }

  bool has_gradients() const {
    for (const auto& parameter : model->parameters()) {
      if (parameter.grad().defined()) return true;
    }
    return false;
  }

  SmallGpt model{nullptr};
  std::unique_ptr<LeanOptimizer> optimizer;
};

void expect_same_parameters(torch::nn::Module& a, torch::nn::Module& b) {
  const auto first = a.parameters();
  const auto second = b.parameters();
  for (std::size_t i = 0; i < first.size(); ++i)
    EXPECT_TRUE(torch::equal(first[i], second[i])) << "parameter " << i;
}

class OfEveryKind : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(OptimizerInBackward, OfEveryKind, ::testing::ValuesIn(optimizer_names()));

TEST_P(OfEveryKind, IsBitIdenticalToAnOrdinaryStep) {
  Training ordinary(GetParam());
  Training fused(GetParam());
  OptimizerInBackward in_backward(*fused.optimizer);
  for (int window = 0; window < 3; ++window) {
    for (int micro = 0; micro < 2; ++micro) {
      ordinary.micro_batch(2 * window + micro);
      if (micro == 1) in_backward.arm();
      fused.micro_batch(2 * window + micro);
      EXPECT_EQ(fused.has_gradients(), micro == 0);
    }
    EXPECT_EQ(in_backward.finish(), static_cast<std::int64_t>(fused.model->parameters().size()));
    ordinary.optimizer->step();
    clear_gradients(*ordinary.model);
  }
  expect_same_parameters(*ordinary.model, *fused.model);
}

TEST(OptimizerInBackward, ThePeakIsLowerByTheGradients) {
  // Wide layers and a small batch: gradients dominate.
  const std::int64_t width = 256;
  const std::int64_t layer_bytes = width * width * 4;
  const int num_layers = 8;
  const auto peak_of_step = [&](bool fused) {
    torch::manual_seed(1);
    torch::nn::Sequential model;
    for (int i = 0; i < num_layers; ++i)
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    AdamW optimizer(model->parameters());
    optimizer.prepare_state();
    OptimizerInBackward in_backward(optimizer);
    const at::Tensor x = torch::randn({1, width});
    auto& meter = MemoryMeter::instance();
    const std::int64_t before = meter.live_bytes();
    meter.reset_peak();
    if (fused) in_backward.arm();
    model->forward(x).sum().backward();
    if (fused) {
      in_backward.finish();
    } else {
      optimizer.step();
    }
    return meter.peak_bytes() - before;
  };
  const std::int64_t saved = peak_of_step(false) - peak_of_step(true);
  const std::int64_t activation_bytes =
      (num_layers + 1) * width * 4;  // live at the first update, gone at the ordinary step
  EXPECT_GE(saved, (num_layers - 1) * layer_bytes - activation_bytes);
  EXPECT_LE(saved, num_layers * layer_bytes);
}

TEST(OptimizerInBackward, TiedWeightsInOneBackwardAreUpdatedOnce) {
  const auto run = [](bool fused) {
    const at::Tensor weight = torch::linspace(-1, 1, 16).reshape({4, 4}).requires_grad_();
    AdamW optimizer({weight}, AdamWOptions(0.1));
    OptimizerInBackward in_backward(optimizer);
    for (int step = 0; step < 3; ++step) {
      if (fused) in_backward.arm();
      torch::mm(torch::mm(torch::ones({2, 4}), weight).tanh(), weight).sum().backward();
      if (fused) {
        EXPECT_EQ(in_backward.finish(), 1);
      } else {
        optimizer.step();
        weight.mutable_grad() = at::Tensor();
      }
    }
    return weight.detach();
  };
  EXPECT_TRUE(torch::equal(run(true), run(false)));
}

/// A weight that the first and the last of three stages share, each stage with a backward of its
/// own, as the executor runs them.
class SharedWeight {
 public:
  SharedWeight() : optimizer_({shared_, middle_}, AdamWOptions(0.1)) {}

  void micro_batch(int index) {
    const at::Tensor x = torch::full({2, 4}, 0.1 * (1 + index));
    const at::Tensor a = torch::mm(x, shared_).tanh();
    const at::Tensor a_leaf = a.detach().requires_grad_();
    const at::Tensor b = torch::mm(a_leaf, middle_).tanh();
    const at::Tensor b_leaf = b.detach().requires_grad_();
    torch::mm(b_leaf, shared_).sum().backward();
    b.backward(b_leaf.grad());
    a.backward(a_leaf.grad());
  }

  at::Tensor shared_ = torch::linspace(-1, 1, 16).reshape({4, 4}).requires_grad_();
  at::Tensor middle_ = torch::linspace(0, 1, 16).reshape({4, 4}).requires_grad_();
  AdamW optimizer_;
};

TEST(OptimizerInBackward, AWeightThatTwoBackwardsReachIsUpdatedAfterTheSecond) {
  SharedWeight ordinary;
  SharedWeight fused;
  OptimizerInBackward in_backward(fused.optimizer_);
  in_backward.expect_backwards(fused.shared_, 2);
  for (int window = 0; window < 3; ++window) {
    for (int micro = 0; micro < 3; ++micro) {
      ordinary.micro_batch(micro);
      if (micro == 2) in_backward.arm();
      fused.micro_batch(micro);
    }
    EXPECT_EQ(in_backward.finish(), 2);
    ordinary.optimizer_.step();
    ordinary.shared_.mutable_grad() = at::Tensor();
    ordinary.middle_.mutable_grad() = at::Tensor();
  }
  EXPECT_TRUE(torch::equal(ordinary.shared_, fused.shared_));
  EXPECT_TRUE(torch::equal(ordinary.middle_, fused.middle_));
}

TEST(OptimizerInBackward, AForgottenSecondBackwardIsAnErrorNotAWrongResult) {
  SharedWeight fused;
  OptimizerInBackward in_backward(fused.optimizer_);
  in_backward.arm();
  EXPECT_ANY_THROW(fused.micro_batch(0));
  in_backward.disarm();
  EXPECT_FALSE(fused.shared_.grad().defined());
}

TEST(OptimizerInBackward, FinishUpdatesWhatTheLastMicroBatchDidNotReach) {
  const auto run = [](bool fused) {
    const at::Tensor used = torch::ones({3}, torch::requires_grad());
    const at::Tensor sometimes = torch::ones({3}, torch::requires_grad());
    const at::Tensor never = torch::ones({3}, torch::requires_grad());
    AdamW optimizer({used, sometimes, never}, AdamWOptions(0.1));
    OptimizerInBackward in_backward(optimizer);
    (used * sometimes).sum().backward();
    if (fused) in_backward.arm();
    (used * used).sum().backward();
    if (fused) {
      EXPECT_EQ(in_backward.finish(), 2);
    } else {
      optimizer.step();
    }
    return torch::cat({used, sometimes, never}).detach();
  };
  EXPECT_TRUE(torch::equal(run(true), run(false)));
}

TEST(OptimizerInBackward, StopsWatchingWhenItEnds) {
  const at::Tensor weight = torch::ones({3}, torch::requires_grad());
  AdamW optimizer({weight}, AdamWOptions(0.1));
  {
    OptimizerInBackward in_backward(optimizer);
    in_backward.arm();
  }
  (weight * 2).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_TRUE(torch::equal(weight, torch::ones({3})));
}

TEST(OptimizerInBackward, RefusesWhatIsImpossibleWithAReason) {
  EXPECT_EQ(why_not_in_backward({}), "");
  UpdateDemands clipping;
  clipping.max_grad_norm = 1.0;
  EXPECT_NE(why_not_in_backward(clipping).find("max_grad_norm"), std::string::npos);
  UpdateDemands scaling;
  scaling.dynamic_loss_scale = true;
  EXPECT_NE(why_not_in_backward(scaling).find("--bf16"), std::string::npos);
  UpdateDemands ranks;
  ranks.num_ranks = 4;
  EXPECT_NE(why_not_in_backward(ranks).find("4 ranks"), std::string::npos);

  const at::Tensor weight = torch::ones({3}, torch::requires_grad());
  AdamW optimizer({weight});
  OptimizerInBackward in_backward(optimizer);
  EXPECT_THROW(in_backward.expect_backwards(torch::ones({3}), 2), ConfigError);
  EXPECT_THROW(in_backward.expect_backwards(weight, 0), ConfigError);
  EXPECT_THROW(in_backward.finish(), Error);
  in_backward.arm();
  EXPECT_THROW(in_backward.arm(), Error);
}

}  // namespace
}  // namespace headroom
