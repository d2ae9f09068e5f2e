#include <headroom/core/random.h>

#include <headroom/memory/meter.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

TEST(RandomState, TheSameStateGivesTheSameNumbers) {
  seed_everything(7);
  torch::randn(
      {3});  // an odd number of normal values leaves one in the generator, which is state too
  const RandomState state = RandomState::capture();
  const at::Tensor first = torch::randn({101});
  const at::Tensor second = torch::randn({101});
  state.restore();
  EXPECT_TRUE(torch::equal(torch::randn({101}), first));
  EXPECT_TRUE(torch::equal(torch::randn({101}), second));
}

TEST(RandomState, ASingleNormalValueIsReproducedWithItsTwin) {
  seed_everything(7);
  const RandomState state = RandomState::capture();
  const double a = torch::randn({1}).item<double>();
  const double b = torch::randn({1}).item<double>();
  const double c = torch::randn({1}).item<double>();
  EXPECT_NE(a, b);
  state.restore();
  EXPECT_EQ(torch::randn({1}).item<double>(), a);
  const RandomState between = RandomState::capture();
  EXPECT_EQ(torch::randn({1}).item<double>(), b);
  EXPECT_EQ(torch::randn({1}).item<double>(), c);
  between.restore();
  EXPECT_EQ(torch::randn({1}).item<double>(), b);
}

TEST(RandomState, ACopyIsIndependentOfLaterDraws) {
  seed_everything(1);
  const RandomState state = RandomState::capture();
  const RandomState copy = state;
  const at::Tensor first = torch::rand({10});
  state.restore();
  torch::rand({1000});
  copy.restore();
  EXPECT_TRUE(torch::equal(torch::rand({10}), first));
}

TEST(RandomState, CapturingOneAllocatesNoTensor) {
  const std::uint64_t before = MemoryMeter::instance().num_allocations();
  const RandomState state = RandomState::capture();
  state.restore();
  EXPECT_EQ(MemoryMeter::instance().num_allocations(), before);
}

TEST(RandomStateScope, PutsBackTheStateFromBefore) {
  seed_everything(1);
  const RandomState one = RandomState::capture();
  const at::Tensor of_one = torch::rand({10});
  seed_everything(2);
  const at::Tensor of_two = torch::rand({10});
  seed_everything(2);
  {
    const RandomStateScope scope(one);
    EXPECT_TRUE(torch::equal(torch::rand({10}), of_one));
  }
  EXPECT_TRUE(torch::equal(torch::rand({10}), of_two));
}

TEST(CpuRandomState, SurvivesAsATensor) {
  seed_everything(3);
  torch::randn({5});
  const at::Tensor saved = cpu_random_state().clone();
  const at::Tensor expected = torch::randn({20});
  seed_everything(4);
  set_cpu_random_state(saved);
  EXPECT_TRUE(torch::equal(torch::randn({20}), expected));
}

TEST(SeedEverything, DifferentSeedsDiffer) {
  seed_everything(1);
  const at::Tensor one = torch::rand({10});
  seed_everything(2);
  EXPECT_FALSE(torch::equal(torch::rand({10}), one));
  seed_everything(1);
  EXPECT_TRUE(torch::equal(torch::rand({10}), one));
}

}  // namespace
}  // namespace headroom
