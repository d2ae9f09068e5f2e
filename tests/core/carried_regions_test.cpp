#include "core/carried_regions.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/object_imports.h"

namespace headroom {
namespace {

constexpr int kParts = 4;

struct Seen {
  std::vector<int> parts;  // in the order in which they were begun
  std::set<int> sizes;     // of the team, as parts saw it
  std::set<long> threads;
  bool saw_parallel = true;
};

Seen run_of_region() {
  Seen run;
  std::mutex mutex;
#pragma omp parallel num_threads(kParts)
  {
    const std::lock_guard<std::mutex> lock(mutex);
    run.parts.push_back(omp_get_thread_num());
    run.sizes.insert(omp_get_num_threads());
    run.threads.insert(syscall(SYS_gettid));
    run.saw_parallel = run.saw_parallel && omp_in_parallel() != 0;
  }
  return run;
}

TEST(CarriedRegions, OneThreadRunsAllPartsInTheirOrder) {
  const CarriedRegions carried(1);
  const Seen run = run_of_region();
  EXPECT_EQ(run.parts, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(run.sizes, std::set<int>{kParts});
  EXPECT_EQ(run.threads, std::set<long>{syscall(SYS_gettid)});
  EXPECT_TRUE(run.saw_parallel);
  EXPECT_EQ(omp_get_num_threads(), 1);
  EXPECT_EQ(omp_in_parallel(), 0);
}

TEST(CarriedRegions, SeveralThreadsShareTheParts) {
  const CarriedRegions carried(2);
  const Seen run = run_of_region();
  EXPECT_EQ(std::set<int>(run.parts.begin(), run.parts.end()), (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(run.parts.size(), 4U);
  EXPECT_EQ(run.sizes, std::set<int>{kParts});
  EXPECT_LE(run.threads.size(), 2U);
}

TEST(CarriedRegions, AreATeamsAgainAfterwards) {
  { const CarriedRegions carried(1); }
  EXPECT_EQ(run_of_region().threads.size(), static_cast<std::size_t>(kParts));
}

TEST(CarriedRegions, ARegionInsideAPartHasOnePart) {
  const CarriedRegions carried(1);
  std::vector<std::pair<int, int>> seen;  // part outside, number inside
#pragma omp parallel num_threads(2)
  {
    const int outside = omp_get_thread_num();
#pragma omp parallel num_threads(2)
    seen.emplace_back(outside, 10 * omp_get_num_threads() + omp_get_thread_num());
  }
  EXPECT_EQ(seen, (std::vector<std::pair<int, int>>{{0, 10}, {1, 10}}));
}

// Parts that spin for each other, as oneDNN's do. How many threads there were.
std::size_t threads_of_spinning_region() {
  std::atomic<int> num_arrived{0};
  std::set<long> threads;
  std::mutex mutex;
#pragma omp parallel num_threads(kParts)
  {
    ++num_arrived;
    while (num_arrived < kParts) {
    }
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(syscall(SYS_gettid));
  }
  return threads.size();
}

TEST(CarriedRegions, PartsThatWaitForEachOtherGetThreads) {
  const CarriedRegions carried(1);
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(threads_of_spinning_region(), static_cast<std::size_t>(kParts));
}

TEST(CarriedRegions, ARegionThatWaitsMayOutliveThem) {
  std::atomic<bool> has_begun{false}, has_ended{false};
  std::thread other;
  {
    const CarriedRegions carried(1);
    other = std::thread([&] {
      std::atomic<int> num_arrived{0};
#pragma omp parallel num_threads(2)
      {
        has_begun = true;
        ++num_arrived;
        while (num_arrived < 2) {
        }
      }
      has_ended = true;
    });
    while (!has_begun) {
    }
  }
  other.join();
  EXPECT_TRUE(has_ended);
}

TEST(CarriedRegions, PartsMeetAtBarriers) {
  const CarriedRegions carried(1);
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::vector<int> written(kParts, 0), read(kParts, 0);
#pragma omp parallel num_threads(kParts)
    {
      const int part = omp_get_thread_num();
      for (int round = 1; round <= 3; ++round) {
        written[part] = round * 10 + part;
#pragma omp barrier
        read[part] += written[(part + 1) % kParts];
#pragma omp barrier
      }
    }
    EXPECT_EQ(read, (std::vector<int>{63, 66, 69, 60}));
  }
}

std::vector<at::Tensor> results_of_libraries() {
  at::manual_seed(7);
  const at::Tensor images = at::randn({4, 8, 24, 24}), filters = at::randn({16, 8, 3, 3});
  const at::Tensor a = at::randn({300, 500}), b = at::randn({500, 200});
  const at::Tensor output = at::conv2d(images, filters, {}, 1, 1);
  const auto [gradient_images, gradient_filters, gradient_bias] = at::convolution_backward(
      output, images, filters, {}, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1, {true, true, false});
  return {
      output,     gradient_images,       gradient_filters, at::mm(a, b), at::mv(a, b.select(1, 0)),
      a.sum(),    at::softmax(a, 1),     at::cumsum(a, 0), a.std(0),     at::gelu(a),
      a.mul(1.5), std::get<0>(a.sort(1))};
}

TEST(CarriedRegions, LibrariesGiveTheSameBits) {
  const int num_threads = at::get_num_threads();
  at::set_num_threads(3);
  const std::vector<at::Tensor> expected = results_of_libraries();
  for (const int carriers : {1, 2}) {
    const CarriedRegions carried(carriers);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::vector<at::Tensor> results = results_of_libraries();
      for (std::size_t i = 0; i < results.size(); ++i)
        EXPECT_TRUE(at::equal(results[i], expected[i])) << i << " with " << carriers;
    }
  }
  at::set_num_threads(num_threads);
}

TEST(ObjectImports, HasWhatALibraryTakesFromOthers) {
  const auto imports = imports_of(reinterpret_cast<const void*>(&at::set_num_threads), {"GOMP_"});
  ASSERT_TRUE(imports);
  EXPECT_EQ(*imports, std::vector<std::string>{"GOMP_parallel"});
  int on_the_stack = 0;
  EXPECT_FALSE(imports_of(&on_the_stack, {""}));
}

}  // namespace
}  // namespace headroom
