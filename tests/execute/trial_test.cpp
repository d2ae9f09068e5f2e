#include "execute/trial.h"

#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

constexpr std::int64_t kEnoughNs = 50'000'000;

struct TrialTest : ::testing::Test {
  ZooModel model = make_model("nin", "width=4,rows=14,columns=14");
  MicroBatch micro = make_synthetic_images(8, model.input.channels, model.input.rows,
                                           model.input.columns, model.input.num_classes, 3)
                         ->load({0, 1, 2, 3});
};

TEST_F(TrialTest, LeavesWeightsBuffersRandomStateAndMemoryAsTheyWere) {
  seed_everything(4);
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : model.chain.parameters())
    before.push_back(parameter.detach().clone());
  for (const auto& [name, buffer] : model.chain.named_buffers()) before.push_back(buffer.clone());
  ASSERT_FALSE(model.chain.named_buffers().empty());
  const RandomState random = RandomState::capture();
  const at::Tensor expected = torch::rand({3});
  random.restore();
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  for (const bool gradients_appear : {true, false}) {
    const auto ns = time_operations(model.chain, micro, keep_everything(model.chain.size()), {},
                                    gradients_appear, kEnoughNs);
    ASSERT_TRUE(ns.has_value());
    EXPECT_GT(*ns, 0);
  }
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
  std::size_t index = 0;
  for (const at::Tensor& parameter : model.chain.parameters()) {
    EXPECT_TRUE(torch::equal(parameter, before[index++]));
    EXPECT_FALSE(parameter.grad().defined());
  }
  for (const auto& [name, buffer] : model.chain.named_buffers())
    EXPECT_TRUE(torch::equal(buffer, before[index++])) << name;
}

TEST_F(TrialTest, GivesNothingWhenMemoryRunsOutAndLetsGoOfEverything) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t live = meter.live_bytes();
  meter.set_cap(live + 20'000);
  EXPECT_FALSE(
      time_operations(model.chain, micro, keep_everything(model.chain.size()), {}, true, kEnoughNs)
          .has_value());
  meter.set_cap(0);
  EXPECT_EQ(meter.live_bytes(), live);
}

}  // namespace
}  // namespace headroom
