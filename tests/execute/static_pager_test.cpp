// Weights, gradients and state that leave the memory and come back: the same bits, the bytes that
// the walk says, and nothing lost when a disk fails.
#include "execute/static_pager.h"
#include "memory/spill_store.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

constexpr std::int64_t kWidth = 48;

// A stage whose largest parameter is neither the first nor the last.
struct NormedLinear : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
  nn::Linear linear{kWidth, kWidth};
  NormedLinear() {
    register_module("norm", norm);
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& input) { return linear->forward(norm->forward(input)); }
};

class StaticPagerTest : public ::testing::Test {
 protected:
  StaticPagerTest()
      : folder_(fs::temp_directory_path() / ("headroom_pager" + std::to_string(::getpid()))) {
    MemoryMeter::instance();
    fs::create_directories(folder_);
    seed_everything(5);
    nn::Sequential network;
    for (int i = 0; i < 4; ++i) network->push_back(nn::Linear(kWidth, kWidth));
    chain_ = Chain::from_sequential(network.ptr(), summed_cross_entropy);
    config_.name = "adamw";
    optimizer_ = make_optimizer(config_, chain_.named_parameters());
    for (const at::Tensor& parameter : chain_.parameters())
      before_.push_back(parameter.detach().clone());
    pager_ = std::make_unique<StaticPager>(chain_, folder_.string(), [&](const at::Tensor& like) {
      return optimizer_state_bytes(config_, {like.sizes().vec()});
    });
    pager_->use_optimizer(optimizer_.get());
  }
  ~StaticPagerTest() override { fs::remove_all(folder_); }

  PagingPlan plan(bool paged, bool reads_ahead) const {
    PagingPlan plan;
    plan.units = pager_->units();
    plan.is_paged.assign(plan.units.size(), {paged, paged, paged});
    plan.reads_ahead = reads_ahead;
    return plan;
  }

  static bool is_on_disk(const at::Tensor& tensor) {
    return mapped_extent(tensor.storage().data_ptr()).num_bytes > 0;
  }

  void expect_same_weights() const {
    const std::vector<at::Tensor> now = chain_.parameters();
    for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(torch::equal(now[i], before_[i])) << i;
  }

  // One update with gradients of ones, in the order of a paged run.
  void walk_update() {
    std::vector<PageStep> steps = forward_steps(pager_->units(), chain_.size());
    for (std::size_t unit = 0; unit < pager_->units().size(); ++unit) {
      PageStep step;
      step.uses = {{{unit, PageKind::kWeights}}, {{unit, PageKind::kGradients}, true, true, false}};
      steps.push_back(step);
    }
    for (PageStep& step : update_steps(pager_->plan(), 0)) steps.push_back(step);
    const std::size_t num_units = pager_->units().size();
    pager_->start(steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      pager_->before(i);
      if (i < chain_.size()) continue;
      const bool is_update = i >= chain_.size() + num_units;
      for (at::Tensor parameter : pager_->parameters((i - chain_.size()) % num_units)) {
        EXPECT_FALSE(is_on_disk(parameter));
        if (is_update) {
          optimizer_->step_parameter(parameter, 0);
          parameter.mutable_grad() = at::Tensor();
        } else {
          parameter.mutable_grad() = torch::ones_like(parameter);
        }
      }
    }
    pager_->before(steps.size());
  }

  fs::path folder_;
  Chain chain_;
  OptimizerConfig config_;
  std::unique_ptr<LeanOptimizer> optimizer_;
  std::vector<at::Tensor> before_;
  std::unique_ptr<StaticPager> pager_;
};

TEST_F(StaticPagerTest, WhatIsPagedTakesNoMemoryAndComesBackTheSame) {
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  const std::int64_t weights = pager_->resident_bytes();
  pager_->adopt(plan(true, true));
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live - weights);
  EXPECT_EQ(pager_->resident_bytes(), 0);
  for (const at::Tensor& parameter : chain_.parameters()) EXPECT_TRUE(is_on_disk(parameter));
  expect_same_weights();  // read where they are
  pager_->adopt({});
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
  for (const at::Tensor& parameter : chain_.parameters()) EXPECT_FALSE(is_on_disk(parameter));
  expect_same_weights();
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(StaticPagerTest, AnUpdateGivesTheSameBitsPagedOrNot) {
  std::vector<std::vector<at::Tensor>> results;
  for (const auto& [paged, reads_ahead] :
       {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
    const torch::NoGradGuard no_grad;
    pager_->adopt({});
    const std::vector<at::Tensor> parameters = chain_.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before_[i]);
    optimizer_ = make_optimizer(config_, chain_.named_parameters());
    pager_->use_optimizer(optimizer_.get());
    pager_->adopt(plan(paged, reads_ahead));
    for (int update = 0; update < 3; ++update) walk_update();
    results.emplace_back();
    for (const at::Tensor& parameter : parameters) results.back().push_back(parameter.clone());
    for (const at::Tensor& tensor : optimizer_->state_tensors())
      results.back().push_back(tensor.clone());
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
    EXPECT_TRUE(torch::equal(results[0][i], results[2][i])) << i;
  }
  EXPECT_FALSE(torch::equal(results[0][0], before_[0]));
}

// The gradients of parameters that are updated already make room for the pieces of the next one's
// state, those that came from disk as well.
TEST_F(StaticPagerTest, StateInPiecesTakesTheBytesThatItsUnitSays) {
  constexpr std::int64_t kNorm = kWidth * 4, kMatrix = kWidth * kWidth * 4, kScalars = 64;
  nn::Sequential network;
  for (int i = 0; i < 3; ++i) network->push_back(std::make_shared<NormedLinear>());
  const Chain chain = Chain::from_sequential(network.ptr(), summed_cross_entropy);
  const auto optimizer = make_optimizer(config_, chain.named_parameters());
  StaticPager pager(
      chain, folder_.string(),
      [&](const at::Tensor& like) { return optimizer_state_bytes(config_, {like.sizes().vec()}); },
      /*may_stream_state=*/true);
  pager.use_optimizer(optimizer.get());
  PagingPlan plan;
  plan.units = pager.units();
  plan.is_paged.assign(plan.units.size(), {true, true, true});
  plan.streams_state.assign(plan.units.size(), true);
  pager.adopt(plan);
  const std::size_t num_units = plan.units.size();
  std::vector<PageStep> steps(num_units);
  for (std::size_t unit = 0; unit < num_units; ++unit)
    steps[unit].uses = {{{unit, PageKind::kWeights}},
                        {{unit, PageKind::kGradients}, true, true, false}};
  for (PageStep& step : update_steps(plan, 0)) steps.push_back(step);
  MemoryMeter& meter = MemoryMeter::instance();
  for (int update = 0; update < 2; ++update) {
    pager.start(steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      pager.before(i);
      const std::size_t unit = i % num_units;
      const std::int64_t live = meter.live_bytes();
      meter.reset_peak();
      for (at::Tensor parameter : pager.parameters(unit)) {
        if (i < num_units) {
          parameter.mutable_grad() = torch::ones_like(parameter);
        } else {
          pager.step_streaming(parameter);
          pager.drop_gradient(unit, parameter);
        }
      }
      if (i < num_units) continue;
      EXPECT_EQ(plan.units[unit].stream_bytes, 2 * kMatrix - 2 * kNorm);
      EXPECT_GE(meter.peak_bytes() - live, plan.units[unit].stream_bytes) << unit;
      EXPECT_LE(meter.peak_bytes() - live, plan.units[unit].stream_bytes + kScalars) << unit;
      EXPECT_EQ(meter.live_bytes(), live - plan.units[unit].bytes_of(PageKind::kGradients));
    }
    pager.before(steps.size());
  }
}

TEST_F(StaticPagerTest, AFailedReadLeavesTheWeightsAsTheyWere) {
  pager_->adopt(plan(true, true));
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  {
    const TransferFaultScope fault(
        [](TransferKind kind, const Extent&) { return kind == TransferKind::kRead ? EIO : 0; });
    pager_->start(forward_steps(pager_->units(), chain_.size()));
    EXPECT_THROW(pager_->before(0), DataError);
    pager_->abandon();
  }
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
  expect_same_weights();
  pager_->start(forward_steps(pager_->units(), chain_.size()));
  for (std::size_t i = 0; i <= chain_.size(); ++i) pager_->before(i);
  expect_same_weights();
}

TEST_F(StaticPagerTest, TensorsOnDiskOutliveThePager) {
  pager_->adopt(plan(true, false));
  pager_.reset();
  expect_same_weights();
}

TEST_F(StaticPagerTest, ATensorMadeOnDiskIsPagedAsItIs) {
  at::Tensor made;
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  {
    const MappedAllocationScope on_disk(pager_->store());
    made = torch::full({1 << 16}, 3.0f);
  }
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
  EXPECT_TRUE(is_on_disk(made));
  EXPECT_EQ(made.sum().item<float>(), 3.0f * (1 << 16));
  EXPECT_FALSE(is_on_disk(torch::ones({1 << 16})));
}

}  // namespace
}  // namespace headroom
