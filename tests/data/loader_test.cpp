#include "data/loader.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <numeric>
#include <thread>

namespace headroom {
namespace {

MicroBatch as_batch(c10::ArrayRef<std::int64_t> indices) {
  const auto count = static_cast<std::int64_t>(indices.size());
  return {{torch::tensor(indices)}, {}, count, count};
}

std::vector<std::int64_t> values(const MicroBatch& batch) {
  const at::Tensor& tensor = batch.inputs.at(0);
  return {tensor.data_ptr<std::int64_t>(), tensor.data_ptr<std::int64_t>() + tensor.numel()};
}

class Loader : public ::testing::TestWithParam<bool> {};  // prefetch?

INSTANTIATE_TEST_SUITE_P(WithAndWithoutPrefetch, Loader, ::testing::Bool());

TEST_P(Loader, HandsOutInTheOrderOfRequests) {
  MicroBatchLoader loader(as_batch, GetParam());
  for (std::int64_t i = 0; i < 50; ++i) loader.request({i, 2 * i});
  for (std::int64_t i = 0; i < 50; ++i)
    EXPECT_EQ(values(loader.next()), (std::vector<std::int64_t>{i, 2 * i}));
  loader.request({7});
  EXPECT_EQ(values(loader.next()), std::vector<std::int64_t>{7});
}

TEST_P(Loader, ThrowsWhatLoadingThrewAndGoesOn) {
  MicroBatchLoader loader(
      [](c10::ArrayRef<std::int64_t> indices) {
        if (indices[0] == 1) throw DataError("sample 1 is bad");
        return as_batch(indices);
      },
      GetParam());
  for (std::int64_t i = 0; i < 3; ++i) loader.request({i});
  EXPECT_EQ(values(loader.next()), std::vector<std::int64_t>{0});
  EXPECT_THROW(loader.next(), DataError);
  EXPECT_EQ(values(loader.next()), std::vector<std::int64_t>{2});
}

TEST_P(Loader, ClearForgetsEveryRequest) {
  MicroBatchLoader loader(as_batch, GetParam());
  for (int round = 0; round < 20; ++round) {
    for (std::int64_t i = 0; i < 5; ++i) loader.request({i});
    loader.next();
    loader.clear();
    loader.request({100 + round});
    EXPECT_EQ(values(loader.next()), std::vector<std::int64_t>{100 + round});
  }
}

TEST_P(Loader, CanBeDestroyedWithRequestsOpen) {
  MicroBatchLoader loader(as_batch, GetParam());
  for (std::int64_t i = 0; i < 5; ++i) loader.request({i});
}

TEST(MicroBatchLoader, PrefetchesOneAheadOnAnotherThreadAndNoMore) {
  std::atomic<int> num_loaded{0};
  std::atomic<bool> on_this_thread{false};
  const auto here = std::this_thread::get_id();
  MicroBatchLoader loader(
      [&](c10::ArrayRef<std::int64_t> indices) {
        if (std::this_thread::get_id() == here) on_this_thread = true;
        ++num_loaded;
        return as_batch(indices);
      },
      true);
  for (std::int64_t i = 0; i < 10; ++i) loader.request({i});
  for (int handed_out = 1; handed_out <= 5; ++handed_out) {
    loader.next();
    EXPECT_LE(num_loaded, handed_out + 1);
  }
  EXPECT_FALSE(on_this_thread);
}

TEST(MicroBatchLoader, WithoutPrefetchNothingIsLoadedBeforeItIsAskedFor) {
  int num_loaded = 0;
  MicroBatchLoader loader(
      [&](c10::ArrayRef<std::int64_t> indices) {
        ++num_loaded;
        return as_batch(indices);
      },
      false);
  loader.request({0});
  loader.request({1});
  EXPECT_EQ(num_loaded, 0);
  loader.next();
  EXPECT_EQ(num_loaded, 1);
}

TEST(SyntheticImages, DependOnSeedAndIndexAlone) {
  const auto data = make_synthetic_images(100, 3, 4, 5, 7, 1);
  EXPECT_EQ(data->size(), 100);
  const MicroBatch all = data->load({0, 1, 2, 3, 99});
  EXPECT_EQ(all.inputs[0].sizes(), (std::vector<std::int64_t>{5, 3, 4, 5}));
  const MicroBatch one = data->load({99});
  EXPECT_TRUE(torch::equal(all.inputs[0][4], one.inputs[0][0]));
  EXPECT_TRUE(torch::equal(all.targets[0][4], one.targets[0][0]));
  EXPECT_FALSE(torch::equal(all.inputs[0][0], all.inputs[0][1]));
  EXPECT_FALSE(
      torch::equal(make_synthetic_images(100, 3, 4, 5, 7, 2)->load({99}).inputs[0], one.inputs[0]));
}

TEST(SyntheticImages, AreRoughlyNormalWithLabelsInRange) {
  const auto data = make_synthetic_images(500, 1, 10, 10, 7, 1);
  std::vector<std::int64_t> indices(500);
  std::iota(indices.begin(), indices.end(), 0);
  const MicroBatch batch = data->load(indices);
  EXPECT_NEAR(batch.inputs[0].mean().item<double>(), 0.0, 0.02);
  EXPECT_NEAR(batch.inputs[0].std().item<double>(), 1.0, 0.02);
  EXPECT_EQ(batch.targets[0].min().item<std::int64_t>(), 0);
  EXPECT_EQ(batch.targets[0].max().item<std::int64_t>(), 6);
}

TEST(SyntheticTokens, TargetsAreTheNextTokens) {
  const auto data = make_synthetic_tokens(10, 16, 50, 3);
  const MicroBatch batch = data->load({2, 5});
  EXPECT_EQ(batch.inputs[0].sizes(), (std::vector<std::int64_t>{2, 16}));
  EXPECT_TRUE(torch::equal(batch.inputs[0].slice(1, 1), batch.targets[0].slice(1, 0, 15)));
  EXPECT_EQ(batch.num_items, 32);
  EXPECT_EQ(data->count_items({2, 5}), 32);
  EXPECT_LT(batch.inputs[0].max().item<std::int64_t>(), 50);
}

}  // namespace
}  // namespace headroom
