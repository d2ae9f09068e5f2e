#include "data/read_ahead.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>

namespace headroom {
namespace {

using Bytes = ReadAhead::Bytes;

Bytes bytes_of(std::int64_t sample) { return Bytes(10, static_cast<std::uint8_t>(sample)); }

TEST(ReadAhead, GivesTheSameWithAnyNumberOfWorkers) {
  for (const int num_workers : {0, 1, 3}) {
    ReadAhead ahead(bytes_of, num_workers);
    std::vector<std::int64_t> samples(100);
    std::iota(samples.begin(), samples.end(), 0);
    samples.push_back(7);  // twice
    ahead.expect(samples.data(), samples.size());
    for (auto sample = samples.rbegin(); sample != samples.rend(); ++sample)
      EXPECT_EQ(ahead.take(*sample), bytes_of(*sample));
    EXPECT_EQ(ahead.take(5), bytes_of(5)) << "one that nobody expected";
  }
}

TEST(ReadAhead, ReadsBeforeItIsAsked) {
  std::mutex mutex;
  std::condition_variable changed;
  int num_read = 0;
  ReadAhead ahead(
      [&](std::int64_t sample) {
        const std::lock_guard<std::mutex> lock(mutex);
        ++num_read;
        changed.notify_all();
        return bytes_of(sample);
      },
      2);
  const std::vector<std::int64_t> samples = {1, 2, 3};
  ahead.expect(samples.data(), samples.size());
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return num_read == 3; });
}

TEST(ReadAhead, HoldsNoMoreThanItMay) {
  std::atomic<int> num_read{0};
  ReadAhead ahead(
      [&](std::int64_t sample) {
        ++num_read;
        return bytes_of(sample);
      },
      1, 30);
  std::vector<std::int64_t> samples(50);
  std::iota(samples.begin(), samples.end(), 0);
  ahead.expect(samples.data(), samples.size());
  EXPECT_EQ(ahead.take(0), bytes_of(0));
  EXPECT_LE(num_read, 6);  // three that are held, one in work, one taken, and its successor
  for (int sample = 1; sample < 50; ++sample) EXPECT_EQ(ahead.take(sample), bytes_of(sample));
}

TEST(ReadAhead, ReadsItselfWhatAThreadTakesLongFor) {
  std::mutex mutex;
  std::condition_variable changed;
  bool has_begun = false, may_end = false;
  const std::thread::id caller = std::this_thread::get_id();
  ReadAhead ahead(
      [&](std::int64_t sample) {
        if (std::this_thread::get_id() == caller) return bytes_of(sample);
        std::unique_lock<std::mutex> lock(mutex);
        has_begun = true;
        changed.notify_all();
        changed.wait(lock, [&] { return may_end; });  // as if others had the core
        return bytes_of(sample);
      },
      1);
  const std::vector<std::int64_t> samples = {1, 2};
  ahead.expect(samples.data(), samples.size());
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return has_begun; });
  lock.unlock();
  EXPECT_EQ(ahead.take(1), bytes_of(1));
  EXPECT_EQ(ahead.take(2), bytes_of(2));
  lock.lock();
  may_end = true;
  changed.notify_all();
}

TEST(ReadAhead, ThrowsWhatReadingThrewWhereItIsTaken) {
  ReadAhead ahead(
      [](std::int64_t sample) -> Bytes {
        if (sample == 2) throw DataError("sample 2");
        return bytes_of(sample);
      },
      2);
  const std::vector<std::int64_t> samples = {1, 2, 3};
  ahead.expect(samples.data(), samples.size());
  EXPECT_EQ(ahead.take(1), bytes_of(1));
  EXPECT_THROW(ahead.take(2), DataError);
  EXPECT_EQ(ahead.take(3), bytes_of(3));
}

}  // namespace
}  // namespace headroom
