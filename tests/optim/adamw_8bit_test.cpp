#include "optim/adamw_8bit.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include <headroom/core/error.h>
#include "optim/adam.h"
#include "optim/reference.h"

namespace headroom {
namespace {

using testing::expect_independent_of_threads;
using testing::ReferencePair;
using testing::Shapes;

constexpr std::int64_t kEverything = 0;

/// How far two runs from the same start are apart, relative to how far they went.
double relative_distance(const at::Tensor& ours, const at::Tensor& theirs,
                         const at::Tensor& start) {
  return ((ours - theirs).norm() / (theirs - start).norm()).item<double>();
}

TEST(AdamW8bit, KeepsTwoBytesPerParameter) {
  const at::Tensor matrix = torch::zeros({512, 300}, torch::requires_grad());
  AdamW8bit optimizer({matrix});
  optimizer.prepare_state();
  EXPECT_LE(static_cast<double>(optimizer.state_bytes()),
            2.04 * static_cast<double>(matrix.numel()));
}

TEST(AdamW8bit, StaysCloseToAdamW) {
  ReferencePair pair(Shapes{{100, 130}, {5003}});
  std::vector<at::Tensor> start;
  for (const auto& p : pair.ours) start.push_back(p.detach().clone());
  AdamW8bit ours(pair.ours, AdamW8bitOptions(1e-3).weight_decay(0.1));
  AdamW theirs(pair.theirs, AdamWOptions(1e-3).weight_decay(0.1));
  torch::manual_seed(5);
  std::vector<at::Tensor> drift;  // a mean gradient per element, under noise
  for (const auto& p : pair.ours) drift.push_back(torch::randn(p.sizes()));
  for (int step = 0; step < 300; ++step) {
    pair.give_gradients(step);
    for (std::size_t i = 0; i < drift.size(); ++i) {
      pair.ours[i].mutable_grad().add_(drift[i], 0.02);
      pair.theirs[i].mutable_grad().add_(drift[i], 0.02);
    }
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < start.size(); ++i)
    EXPECT_LE(relative_distance(pair.ours[i], pair.theirs[i], start[i]), 0.03);
}

TEST(AdamW8bit, TheSecondMomentFollowsWhereRoundingToNearestWouldFreezeIt) {
  // All elements of a block but one get smaller gradients after a while. The one keeps the block's
  // scale up, so that only the codes can move, and a single update moves them by less than a tenth
  // of a step.
  ReferencePair pair(Shapes{{16, 256}});
  AdamW8bit ours(pair.ours, AdamW8bitOptions(1e-3).min_8bit_size(kEverything));
  AdamW theirs(pair.theirs, AdamWOptions(1e-3));
  at::Tensor start;
  torch::manual_seed(6);
  for (int step = 0; step < 4000; ++step) {
    at::Tensor gradient = torch::randn({16, 256});
    if (step >= 1000) gradient.slice(1, 1, 256).mul_(0.2);
    gradient.slice(1, 1, 256).add_(0.02);
    pair.ours[0].mutable_grad() = gradient;
    pair.theirs[0].mutable_grad() = gradient.clone();
    if (step == 3500) {
      torch::NoGradGuard no_grad;
      start = pair.theirs[0].detach().clone();
      pair.ours[0].copy_(start);
    }
    ours.step();
    theirs.step();
  }
  EXPECT_LE(relative_distance(pair.ours[0], pair.theirs[0], start), 0.1);
}

TEST(AdamW8bit, SmallTensorsAreExactlyAdamW) {
  ReferencePair pair(Shapes{{7}, {63, 65}, {4095}});
  AdamW8bit ours(pair.ours, AdamW8bitOptions(1e-2));
  AdamW theirs(pair.theirs, AdamWOptions(1e-2));
  for (int step = 0; step < 20; ++step) {
    pair.give_gradients(step);
    ours.step();
    theirs.step();
  }
  EXPECT_TRUE(pair.identical());
  AdamW8bit all_fp32({torch::zeros({100, 100}, torch::requires_grad())},
                     AdamW8bitOptions().min_8bit_size(std::numeric_limits<std::int64_t>::max()));
  all_fp32.prepare_state();
  EXPECT_EQ(all_fp32.state_bytes(), 8 * 10000);
}

TEST(AdamW8bit, TheFirstUpdateIsExact) {
  ReferencePair pair(Shapes{{97, 101}});
  AdamW8bit ours(pair.ours);
  AdamW theirs(pair.theirs);
  pair.give_gradients(0);
  ours.step();
  theirs.step();
  EXPECT_LE(pair.largest_difference(), 3e-7);  // the last bit of the parameters
}

TEST(AdamW8bit, ElementsWithoutGradientDoNotMove) {
  const at::Tensor p = torch::ones({20, 256}, torch::requires_grad());
  AdamW8bit optimizer({p}, AdamW8bitOptions(0.1).weight_decay(0));
  torch::manual_seed(2);
  for (int step = 0; step < 10; ++step) {
    at::Tensor gradient = torch::randn({20, 256});
    gradient.slice(1, 0, 100).zero_();
    gradient.slice(0, 0, 2).zero_();  // whole blocks
    p.mutable_grad() = gradient;
    optimizer.step();
  }
  EXPECT_TRUE(p.slice(1, 0, 100).eq(1).all().item<bool>());
  EXPECT_TRUE(p.slice(0, 0, 2).eq(1).all().item<bool>());
  EXPECT_TRUE(p.slice(0, 2).slice(1, 100).ne(1).all().item<bool>());
}

TEST(AdamW8bit, AVanishingGradientMakesNoWildStep) {
  // Gradients that span ten decades within each block, then stop: a second moment rounded to 0
  // would divide the first one by eps.
  torch::manual_seed(8);
  const at::Tensor gradient = torch::pow(10.0, -10 * torch::rand({20, 256}));
  const auto largest_way = [&gradient](auto make) {
    const at::Tensor p = torch::zeros({20, 256}, torch::requires_grad());
    auto optimizer = make(p);
    for (int step = 0; step < 30; ++step) {
      p.mutable_grad() = step < 10 ? gradient.clone() : torch::zeros_like(gradient);
      optimizer.step();
    }
    return p.abs().max().template item<double>();
  };
  const double exact =
      largest_way([](const at::Tensor& p) { return AdamW({p}, AdamWOptions(1e-3)); });
  const double quantized =
      largest_way([](const at::Tensor& p) { return AdamW8bit({p}, AdamW8bitOptions(1e-3)); });
  EXPECT_LE(quantized, 5 * exact);
}

TEST(AdamW8bit, DoesNotDependOnTheNumberOfThreads) {
  expect_independent_of_threads<AdamW8bit>({{700, 333}, {65537}});
}

TEST(AdamW8bit, RefusesOtherTypesAndLayouts) {
  const auto refuses = [](const at::Tensor& values) {
    const at::Tensor p = values.requires_grad_();
    AdamW8bit optimizer({p});
    p.mutable_grad() = torch::zeros_like(p);
    EXPECT_THROW(optimizer.prepare_state(), ConfigError);
    EXPECT_THROW(optimizer.step(), ConfigError);
  };
  refuses(torch::zeros({80, 80}, torch::kDouble));
  refuses(torch::zeros({80, 80}, torch::kBFloat16));
  refuses(torch::zeros({80, 90}).t());
}

}  // namespace
}  // namespace headroom
