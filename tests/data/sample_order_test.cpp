#include "data/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace headroom {
namespace {

constexpr std::int64_t kMany = SampleOrder::kMostInTable;

std::vector<std::int64_t> list(const SampleOrder& order) {
  std::vector<std::int64_t> all;
  for (std::int64_t place = 0; place < order.size(); ++place) all.push_back(order[place]);
  return all;
}

std::vector<std::int64_t> numbers(std::int64_t count) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(SampleOrder, IsSequentialUnlessShuffled) {
  EXPECT_EQ(list({100, false, 42, 7}), numbers(100));
  EXPECT_EQ(list({kMany + 5, false, 42, 0}), numbers(kMany + 5));
}

TEST(SampleOrder, IsAPermutationThatDependsOnSeedAndEpochAlone) {
  for (const std::int64_t size : {std::int64_t{1000}, kMany, kMany + 1, 2 * kMany, 2 * kMany + 1}) {
    const auto order = list({size, true, 42, 3});
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, numbers(size)) << size;
    EXPECT_EQ(list({size, true, 42, 3}), order);
    EXPECT_NE(list({size, true, 42, 4}), order);
    EXPECT_NE(list({size, true, 43, 3}), order);
    EXPECT_NE(list({size, true, 42ULL + (1ULL << 40), 3}), order) << "all 64 bits of the seed";
  }
}

// Another order would be another training: these numbers stay.
TEST(SampleOrder, IsTheSameEverywhere) {
  EXPECT_EQ(list({10, true, 42, 3}), (std::vector<std::int64_t>{3, 5, 9, 7, 6, 1, 8, 2, 0, 4}));
  const SampleOrder large(200000, true, 42, 3);
  const std::vector<std::int64_t> first = {large[0], large[1], large[2], large[3]};
  EXPECT_EQ(first, (std::vector<std::int64_t>{67906, 17606, 184655, 87008}));
}

// As random as one by a table: neither neighbours nor places are kept, and each tenth of the epoch
// has its share of each tenth of the samples. The bounds are ten deviations wide.
TEST(SampleOrder, OfManySamplesIsMixed) {
  const std::int64_t size = 200000, tenth = size / 10;
  const SampleOrder order(size, true, 1, 0);
  std::int64_t num_kept = 0, num_neighbours = 0;
  std::vector<std::int64_t> counts(100);
  for (std::int64_t place = 0; place < size; ++place) {
    const std::int64_t sample = order[place];
    num_kept += sample == place ? 1 : 0;
    num_neighbours += place > 0 && std::abs(sample - order[place - 1]) == 1 ? 1 : 0;
    ++counts[static_cast<std::size_t>(place / tenth * 10 + sample / tenth)];
  }
  EXPECT_LT(num_kept, 12);
  EXPECT_LT(num_neighbours, 17);
  for (const std::int64_t count : counts) EXPECT_NEAR(static_cast<double>(count), 2000, 430);
}

// Nothing of this size could be held.
TEST(SampleOrder, TakesNoMemoryForEachSample) {
  const std::int64_t size = std::int64_t{1} << 50;
  const SampleOrder order(size, true, 9, 2);
  for (const std::int64_t place : {std::int64_t{0}, size / 2, size - 1}) {
    EXPECT_GE(order[place], 0);
    EXPECT_LT(order[place], size);
  }
}

TEST(SampleOrder, FewSamplesAreNoSpecialCase) {
  EXPECT_EQ(list({0, true, 42, 0}), std::vector<std::int64_t>{});
  EXPECT_EQ(list({1, true, 42, 0}), std::vector<std::int64_t>{0});
}

}  // namespace
}  // namespace headroom
