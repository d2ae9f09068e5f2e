#include "train/windows.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include <set>

namespace headroom {
namespace {

Grouping grouping_of(std::int64_t num_samples, std::int64_t micro_batch,
                     AccumulationSchedule schedule) {
  Grouping grouping;
  grouping.num_samples = num_samples;
  grouping.micro_batch = micro_batch;
  grouping.schedule = std::move(schedule);
  grouping.shuffle = false;
  return grouping;
}

std::vector<std::size_t> window_sizes(const Grouping& grouping, int count) {
  WindowWalk walk(grouping);
  std::vector<std::size_t> sizes;
  for (int i = 0; i < count; ++i) sizes.push_back(walk.next().samples.size());
  return sizes;
}

TEST(Windows, TheLastOneOfAnEpochIsAsLargeAsWhatIsLeft) {
  const Grouping grouping = grouping_of(21, 4, 2);
  EXPECT_EQ(grouping.num_windows(0), 3);
  EXPECT_EQ(window_sizes(grouping, 6), (std::vector<std::size_t>{8, 8, 5, 8, 8, 5}));
}

TEST(Windows, TheLastOneIsDroppedOnRequest) {
  Grouping grouping = grouping_of(21, 4, 2);
  grouping.drop_last = true;
  EXPECT_EQ(grouping.num_windows(0), 2);
  EXPECT_EQ(window_sizes(grouping, 4), (std::vector<std::size_t>{8, 8, 8, 8}));
  grouping.num_samples = 7;
  EXPECT_THROW(WindowWalk{grouping}, ConfigError);
}

TEST(Windows, DroppingMayNotLeaveALaterEpochEmpty) {
  Grouping grouping = grouping_of(21, 4, {{0, 1}, {1, 8}});
  grouping.drop_last = true;
  EXPECT_THROW(WindowWalk{grouping}, ConfigError);
}

TEST(Windows, FollowTheScheduleOfEpochs) {
  const Grouping grouping = grouping_of(10, 2, {{0, 1}, {1, 2}, {2, 5}});
  EXPECT_EQ(window_sizes(grouping, 10), (std::vector<std::size_t>{2, 2, 2, 2, 2, 4, 4, 2, 10, 10}));
  EXPECT_EQ(grouping.num_updates(1), 5);
  EXPECT_EQ(grouping.num_updates(2), 8);
  EXPECT_EQ(grouping.num_updates(4), 10);
}

TEST(Windows, TheSizesThatOccurAreKnownInAdvance) {
  using Sizes = std::vector<std::int64_t>;
  const Grouping grouping = grouping_of(10, 2, {{0, 1}, {1, 2}, {2, 8}});  // 5, 3 and 1 windows
  EXPECT_EQ(grouping.window_sizes(0, 5), (Sizes{2}));
  EXPECT_EQ(grouping.window_sizes(0, 6), (Sizes{2, 4}));
  EXPECT_EQ(grouping.window_sizes(0, 1000), (Sizes{2, 4, 10})) << "none above the samples";
  EXPECT_EQ(grouping.window_sizes(4, 1000), (Sizes{2, 4, 10}));
  EXPECT_EQ(grouping.window_sizes(5, 1000), (Sizes{4, 10}));
  EXPECT_EQ(grouping.window_sizes(8, 1000), (Sizes{10}));
  EXPECT_EQ(grouping.window_sizes(900, 1000), (Sizes{10}));
}

TEST(Windows, AGlobalBatchDecidesAlone) {
  Grouping grouping = grouping_of(10, 3, 7);
  grouping.global_batch = 8;
  EXPECT_EQ(window_sizes(grouping, 3), (std::vector<std::size_t>{8, 2, 8}));
  grouping.global_batch = 100;
  EXPECT_EQ(window_sizes(grouping, 2), (std::vector<std::size_t>{10, 10}));
}

TEST(Windows, AFractionOfAnEpochIsRoundedUp) {
  const Grouping grouping = grouping_of(100, 10, 1);
  EXPECT_EQ(grouping.num_updates(0.5), 5);
  EXPECT_EQ(grouping.num_updates(0.51), 6);
  EXPECT_EQ(grouping.num_updates(1.3), 13) << "not 14 by rounding of the fraction";
  EXPECT_EQ(grouping.num_updates(0.001), 1);
}

TEST(Windows, AnEpochHoldsEverySampleOnceAndEpochsDiffer) {
  Grouping grouping = grouping_of(21, 4, 2);
  grouping.shuffle = true;
  WindowWalk walk(grouping);
  std::vector<std::vector<std::int64_t>> epochs;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<std::int64_t> samples;
    for (int window = 0; window < 3; ++window) {
      for (const std::int64_t sample : walk.next().samples) samples.push_back(sample);
    }
    EXPECT_EQ(std::set<std::int64_t>(samples.begin(), samples.end()).size(), 21U);
    EXPECT_EQ(walk.epoch(), epoch);
    EXPECT_EQ(walk.epochs_done(), epoch + 1.0);
    epochs.push_back(samples);
  }
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST(Windows, WhereSamplesAreDrawnAnewNoEpochSeesThoseOfAnother) {
  Grouping grouping = grouping_of(21, 4, 2);
  grouping.resamples_each_epoch = true;
  grouping.shuffle = true;
  WindowWalk walk(grouping);
  std::set<std::int64_t> seen;
  for (int window = 0; window < 9; ++window) {
    for (const std::int64_t sample : walk.next().samples) seen.insert(sample);
  }
  EXPECT_EQ(seen.size(), 63U);
  EXPECT_EQ(*seen.rbegin(), 62);
}

TEST(Windows, SeekingIsTheSameAsWalking) {
  Grouping grouping = grouping_of(21, 2, {{0, 2}, {1, 3}, {3, 1}});
  grouping.shuffle = true;
  for (std::int64_t start = 0; start < 40; ++start) {
    WindowWalk walked(grouping);
    for (std::int64_t i = 0; i < start; ++i) walked.next();
    WindowWalk sought(grouping, start);
    EXPECT_EQ(sought.epochs_done(), walked.epochs_done()) << start;
    for (int i = 0; i < 15; ++i) {
      const Window a = sought.next(), b = walked.next();
      EXPECT_EQ(a.samples, b.samples) << start << " + " << i;
      EXPECT_EQ(a.update, start + i + 1);
      EXPECT_EQ(a.full_size, b.full_size);
    }
  }
}

TEST(Windows, RanksShareAWindowAsEquallyAsTheyCan) {
  for (std::int64_t num_samples = 0; num_samples < 12; ++num_samples) {
    for (std::int64_t num_ranks = 1; num_ranks < 6; ++num_ranks) {
      std::int64_t done = 0;
      for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
        const Share share = share_of(num_samples, rank, num_ranks);
        EXPECT_EQ(share.begin, done) << "each sample once, in order";
        done = share.end;
        const std::int64_t size = share.end - share.begin;
        EXPECT_TRUE(size == num_samples / num_ranks ||
                    size == (num_samples + num_ranks - 1) / num_ranks);
        EXPECT_LE(size, share_of(num_samples, 0, num_ranks).end) << "rank 0 has the largest";
      }
      EXPECT_EQ(done, num_samples);
    }
  }
}

TEST(Windows, RanksMakeTheWindowLargerUnlessTheGlobalBatchIsGiven) {
  Grouping grouping;
  grouping.num_samples = 100;
  grouping.micro_batch = 8;
  grouping.schedule = AccumulationSchedule::parse("2");
  grouping.num_ranks = 2;
  EXPECT_EQ(grouping.window_samples(0), 32);
  EXPECT_EQ(grouping.num_windows(0), 4);
  grouping.global_batch = 10;
  EXPECT_EQ(grouping.window_samples(0), 10);
}

}  // namespace
}  // namespace headroom
