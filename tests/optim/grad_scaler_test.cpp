#include <headroom/optim/grad_scaler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include <headroom/core/error.h>
#include "optim/adam.h"

namespace headroom {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

/// PyTorch's rule, as its documentation states it.
struct Rule {
  float scale;
  int good = 0;
  void after(bool overflow, float growth, float backoff, int interval) {
    if (overflow) {
      scale *= backoff;
      good = 0;
    } else if (++good == interval) {
      scale *= growth;
      good = 0;
    }
  }
};

TEST(GradScaler, FollowsPyTorchsRuleStepByStep) {
  GradScaler scaler({1024, 3.0, 0.25, 3, true});
  Rule rule{1024};
  const std::string overflows = "..x....x..xx.........x...";
  std::int64_t num_skipped = 0;
  for (const char c : overflows) {
    const bool overflow = c == 'x';
    const at::Tensor gradient = torch::full({5}, scaler.scale_factor() * 0.5);
    if (overflow) gradient[2] = kFloatInfinity;
    EXPECT_EQ(scaler.unscale(std::vector<at::Tensor>{gradient}), !overflow);
    if (!overflow) {
      EXPECT_NEAR(gradient[0].item<float>(), 0.5f, 1e-6f);
    }
    scaler.update();
    rule.after(overflow, 3.0f, 0.25f, 3);
    num_skipped += overflow ? 1 : 0;
    ASSERT_EQ(static_cast<float>(scaler.scale_factor()), rule.scale);
    ASSERT_EQ(scaler.num_skipped(), num_skipped);
  }
}

TEST(GradScaler, UnscalesGradientsThatAreCompleteBeforeOthers) {
  for (const bool overflow : {false, true}) {
    GradScaler scaler({1024, 2.0, 0.5, 100, true});
    const at::Tensor early = torch::full({5}, 512.0f), late = torch::full({3}, 1024.0f);
    if (overflow) early[1] = kFloatInfinity;
    scaler.unscale_part({early});
    EXPECT_EQ(early[0].item<float>(), 0.5f);
    EXPECT_EQ(scaler.unscale(std::vector<at::Tensor>{late}), !overflow);
    EXPECT_EQ(late[0].item<float>(), 1.0f);
    scaler.update();
    EXPECT_EQ(scaler.scale_factor(), overflow ? 512.0 : 1024.0);
    scaler.unscale_part({torch::full({1}, kFloatNan)});
    scaler.forget_parts();  // the update starts anew
    EXPECT_TRUE(scaler.unscale(std::vector<at::Tensor>{late}));
  }
}

TEST(GradScaler, SeesOneBadValueAnywhere) {
  for (const float bad : {kFloatInfinity, -kFloatInfinity, kFloatNan}) {
    for (const std::int64_t position : {0, 15, 16, 40000, 99999, 100002}) {
      GradScaler scaler;
      const at::Tensor large = torch::ones({100003});
      large[position] = bad;
      EXPECT_FALSE(scaler.unscale({torch::ones({3}), at::Tensor(), large})) << position;
    }
  }
  GradScaler scaler;
  EXPECT_TRUE(scaler.unscale({torch::ones({3}), at::Tensor(), torch::ones({3}, torch::kDouble)}));
  const at::Tensor half = torch::full({4}, kFloatInfinity, torch::kBFloat16);
  scaler.update();
  EXPECT_FALSE(scaler.unscale(std::vector<at::Tensor>{half}));
}

TEST(GradScaler, KeepsAFiniteScale) {
  GradScaler scaler({3e38, 2.0, 0.5, 1, true});
  EXPECT_TRUE(scaler.unscale({torch::ones({1})}));
  scaler.update();
  EXPECT_EQ(static_cast<float>(scaler.scale_factor()), 3e38f);
}

TEST(GradScaler, RefusesToUnscaleTwiceAndToUpdateWithoutIt) {
  GradScaler scaler;
  EXPECT_THROW(scaler.update(), Error);
  scaler.unscale({torch::ones({1})});
  EXPECT_THROW(scaler.unscale({torch::ones({1})}), Error);
  scaler.update();
  EXPECT_NO_THROW(scaler.unscale({torch::ones({1})}));
  EXPECT_THROW(GradScaler({0.0}), ConfigError);
  EXPECT_THROW(GradScaler({1.0, 1.0}), ConfigError);
  EXPECT_THROW(GradScaler({1.0, 2.0, 1.0}), ConfigError);
  EXPECT_THROW(GradScaler({1.0, 2.0, 0.5, 0}), ConfigError);
}

TEST(GradScaler, DisabledChangesNothing) {
  GradScalerOptions options;
  options.enabled = false;
  GradScaler scaler(options);
  const at::Tensor loss = torch::tensor(2.5f);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  const at::Tensor gradient = torch::full({3}, kFloatInfinity);
  EXPECT_TRUE(scaler.unscale(std::vector<at::Tensor>{gradient}));
  scaler.update();
  EXPECT_EQ(scaler.scale_factor(), 1);
  EXPECT_EQ(scaler.num_skipped(), 0);
}

TEST(GradScaler, ContinuesExactlyFromItsState) {
  GradScaler first({256, 2.0, 0.5, 4, true});
  const auto run = [](GradScaler& scaler, const std::string& overflows) {
    for (const char c : overflows) {
      scaler.unscale({torch::full({1}, c == 'x' ? kFloatNan : 1.0f)});
      scaler.update();
    }
  };
  run(first, "..x...");
  GradScaler second({1, 2.0, 0.5, 4, true});
  second.restore(first.state());
  run(first, ".x.....");
  run(second, ".x.....");
  EXPECT_EQ(first.scale_factor(), second.scale_factor());
  EXPECT_EQ(first.state().growth_tracker, second.state().growth_tracker);
  EXPECT_EQ(first.num_skipped(), second.num_skipped());
  EXPECT_THROW(second.restore({0.0, 0, 0}), SnapshotError);
}

/// A window of micro-batches with the scaler, as a training loop writes it.
class Loop {
 public:
  Loop()
      : weight_(torch::linspace(-1, 1, 6).reshape({2, 3}).requires_grad_()),
        optimizer_({weight_}, AdamWOptions(0.05)) {}

  void run_window(const std::vector<at::Tensor>& inputs, int overflow_at) {
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      at::Tensor loss = inputs[static_cast<std::size_t>(i)].matmul(weight_.t()).pow(2).mean() /
                        static_cast<double>(inputs.size());
      if (i == overflow_at) loss = loss * kFloatInfinity;
      scaler_.scale(loss).backward();
    }
    if (scaler_.unscale(optimizer_)) {
      optimizer_.step();
      ++num_updates_;
    }
    scaler_.update();
    weight_.mutable_grad() = at::Tensor();
  }

  at::Tensor weight_;
  AdamW optimizer_;
  GradScaler scaler_;
  int num_updates_ = 0;
};

TEST(GradScaler, AnOverflowInAnyMicroBatchSkipsTheWindowAndLeavesNoTrace) {
  torch::manual_seed(3);
  std::vector<std::vector<at::Tensor>> windows(4);
  for (auto& window : windows) {
    for (int i = 0; i < 4; ++i) window.push_back(torch::randn({5, 3}));
  }
  Loop clean;
  for (const int i : {0, 2, 3}) clean.run_window(windows[static_cast<std::size_t>(i)], -1);
  for (int position = 0; position < 4; ++position) {
    Loop loop;
    loop.run_window(windows[0], -1);
    const at::Tensor before = loop.weight_.detach().clone();
    loop.run_window(windows[1], position);
    EXPECT_TRUE(torch::equal(loop.weight_, before))
        << "updated in spite of an overflow in micro-batch " << position;
    EXPECT_EQ(loop.num_updates_, 1);
    EXPECT_EQ(loop.scaler_.num_skipped(), 1);
    EXPECT_EQ(loop.scaler_.scale_factor(), 32768);
    loop.run_window(windows[2], -1);
    loop.run_window(windows[3], -1);
    // Scales are powers of two, so that the run equals one that never saw the bad window, bit by
    // bit.
    EXPECT_TRUE(torch::equal(loop.weight_, clean.weight_));
    EXPECT_EQ(loop.num_updates_, clean.num_updates_);
  }
}

}  // namespace
}  // namespace headroom
