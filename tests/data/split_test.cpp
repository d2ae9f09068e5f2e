#include <headroom/data/dataset.h>

#include <headroom/core/error.h>

#include <numeric>

namespace headroom {
namespace {

using Sizes = std::vector<std::int64_t>;

MicroBatch token_batch(std::int64_t num_samples, std::int64_t num_tokens) {
  MicroBatch batch;
  batch.inputs = {torch::arange(num_samples * num_tokens).reshape({num_samples, num_tokens})};
  batch.targets = {batch.inputs[0] + 1};
  batch.num_samples = num_samples;
  batch.num_items = num_samples * num_tokens;
  return batch;
}

TEST(BalancedSizes, AreAsEqualAsTheyCanBe) {
  EXPECT_EQ(balanced_sizes(64, 24), (Sizes{22, 21, 21}));
  EXPECT_EQ(balanced_sizes(64, 16), (Sizes{16, 16, 16, 16}));
  EXPECT_EQ(balanced_sizes(5, 8), (Sizes{5}));
  EXPECT_EQ(balanced_sizes(3, 1), (Sizes{1, 1, 1}));
  EXPECT_EQ(balanced_sizes(0, 4), Sizes{});
}

TEST(BalancedSizes, HoldAllSamplesInTheFewestParts) {
  for (std::int64_t total = 1; total <= 70; ++total) {
    for (std::int64_t max_size = 1; max_size <= 70; ++max_size) {
      const Sizes sizes = balanced_sizes(total, max_size);
      EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), total);
      EXPECT_EQ(static_cast<std::int64_t>(sizes.size()), (total + max_size - 1) / max_size);
      EXPECT_LE(sizes.front(), max_size);
      EXPECT_LE(sizes.front() - sizes.back(), 1);
    }
  }
}

TEST(BalancedSizes, RejectNonsense) {
  EXPECT_THROW(balanced_sizes(64, 0), ConfigError);
  EXPECT_THROW(balanced_sizes(64, -2), ConfigError);
  EXPECT_THROW(balanced_sizes(-1, 8), ConfigError);
}

TEST(Split, GivesViewsInOrder) {
  const MicroBatch batch = token_batch(64, 3);
  const std::vector<MicroBatch> parts = split(batch, 24);
  ASSERT_EQ(parts.size(), 3U);
  std::vector<at::Tensor> inputs;
  for (const MicroBatch& part : parts) {
    EXPECT_TRUE(part.inputs[0].is_alias_of(batch.inputs[0]));
    EXPECT_TRUE(part.targets[0].is_alias_of(batch.targets[0]));
    EXPECT_EQ(part.inputs[0].size(0), part.num_samples);
    EXPECT_EQ(part.num_items, part.num_samples * 3);
    inputs.push_back(part.inputs[0]);
  }
  EXPECT_TRUE(torch::cat(inputs).equal(batch.inputs[0]));
}

TEST(Split, LeavesPaddingOutOfTheItems) {
  MicroBatch batch = token_batch(4, 5);
  batch.targets[0].index_put_({0}, kIgnoreIndex);
  batch.targets[0].index_put_({2, torch::indexing::Slice(1, 4)}, kIgnoreIndex);
  batch.num_items = 12;
  const std::vector<MicroBatch> parts = split(batch, 1);
  ASSERT_EQ(parts.size(), 4U);
  EXPECT_EQ(parts[0].num_items, 0);
  EXPECT_EQ(parts[1].num_items, 5);
  EXPECT_EQ(parts[2].num_items, 2);
  EXPECT_EQ(parts[3].num_items, 5);
}

TEST(Split, CountsSamplesWhenTargetsAreNotClasses) {
  MicroBatch batch = token_batch(6, 2);
  batch.targets = {torch::randn({6, 2})};
  batch.num_items = 6;
  for (const MicroBatch& part : split(batch, 2)) EXPECT_EQ(part.num_items, 2);
  batch.targets.clear();
  for (const MicroBatch& part : split(batch, 3)) EXPECT_EQ(part.num_items, 3);
}

TEST(Split, CountsByTheGivenFunction) {
  MicroBatch batch = token_batch(6, 2);
  batch.num_items = 6;
  for (const MicroBatch& part :
       split(batch, 2, [](const MicroBatch& micro) { return micro.num_samples; }))
    EXPECT_EQ(part.num_items, 2);
}

TEST(Split, RefusesItemsThatDoNotAddUp) {
  MicroBatch batch = token_batch(6, 2);
  batch.num_items = 6;
  EXPECT_THROW(split(batch, 2), DataError);
  batch.num_items = 0;  // not counted: the parts are right all the same
  EXPECT_EQ(split(batch, 2).front().num_items, 4);
}

TEST(Split, RefusesTensorsWithoutASampleDimension) {
  MicroBatch batch = token_batch(6, 2);
  batch.inputs.push_back(torch::zeros({5, 6}));
  EXPECT_THROW(split(batch, 2), DataError);
  batch.inputs.back() = torch::zeros({});
  EXPECT_THROW(split(batch, 2), DataError);
  batch.inputs.back() = at::Tensor();
  EXPECT_FALSE(split(batch, 2).front().inputs.back().defined());
}

}  // namespace
}  // namespace headroom
