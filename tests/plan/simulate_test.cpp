#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace headroom {
namespace {

constexpr OperationKind kForward = OperationKind::kForward, kStore = OperationKind::kForwardStore,
                        kKeep = OperationKind::kForwardKeep, kBackward = OperationKind::kBackward,
                        kFree = OperationKind::kFree;

/// Two stages; the numbers are powers of ten, so that a sum shows its terms.
ChainCosts two_stages() {
  ChainCosts chain;
  chain.stages.push_back({"one", 10, 20, 1, 5, 1000, {{100, 2, 3, 7, 9}}, {}});
  chain.stages.push_back({"two", 1, 0, 4, 0, 2000, {{200, 5, 6, 8, 11}}, {}});
  chain.input_grad_bytes = 3;
  chain.boundary_formats.push_back({"half", 0.5, 1, 2});
  return chain;
}

TEST(Simulate, CountsKeepingEverything) {
  const Replay replay =
      simulate(two_stages(),
               {{kKeep, 0, 0, 0}, {kKeep, 1, 0, 0}, {kBackward, 1, 0, 0}, {kBackward, 0, 0, 0}});
  ASSERT_TRUE(replay.valid()) << replay.problem;
  EXPECT_EQ(replay.time_ns, 2 + 5 + 6 + 3);
  const std::vector<std::int64_t> peaks = {107, 308, 300 + 20 + 2000 + 11, 2120 + 3 + 1000 + 9};
  const std::vector<std::int64_t> lives = {100, 300, 100 + 20 + 2000, 3003};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(replay.curve[i].peak_bytes, peaks[i]) << i;
    EXPECT_EQ(replay.curve[i].live_bytes, lives[i]) << i;
  }
  EXPECT_EQ(replay.peak_bytes, 3132);
  EXPECT_EQ(replay.peak_operation, 3u);
}

TEST(Simulate, CountsARecomputedStageAndAStoredBoundary) {
  for (const int format : {0, 1}) {
    const Replay replay = simulate(two_stages(), {{kForward, 0, 0, 0},
                                                  {kKeep, 1, 0, format},
                                                  {kBackward, 1, 0, format},
                                                  {kFree, 1, 0, format},
                                                  {kKeep, 0, 0, 0},
                                                  {kBackward, 0, 0, 0}});
    ASSERT_TRUE(replay.valid()) << replay.problem;
    const std::int64_t stored = format == 0 ? 10 : 5, decoded = format == 0 ? 0 : 10;
    EXPECT_EQ(replay.time_ns, 1 + 5 + 6 + 2 + 3 + (format == 0 ? 0 : 10 * 1 + 2 * 10 * 2));
    EXPECT_EQ(replay.curve[0].peak_bytes, 15);
    EXPECT_EQ(replay.curve[0].live_bytes, 10);
    EXPECT_EQ(replay.curve[1].peak_bytes, stored + decoded + 208);
    EXPECT_EQ(replay.curve[1].live_bytes, stored + 200);
    EXPECT_EQ(replay.curve[2].peak_bytes, stored + decoded + 200 + 20 + 2000 + 11);
    EXPECT_EQ(replay.curve[2].live_bytes, stored + 20 + 2000);
    EXPECT_EQ(replay.curve[3].live_bytes, 2020);
    EXPECT_EQ(replay.curve[4].peak_bytes, 2127);
  }
}

TEST(Simulate, NamesWhatAListLacks) {
  const std::vector<std::pair<std::vector<Operation>, std::string>> cases = {
      {{}, "ends before"},
      {{{kKeep, 2, 0, 0}}, "no such stage"},
      {{{kKeep, 0, 1, 0}}, "no such option"},
      {{{kKeep, 0, 0, 2}}, "no such format"},
      {{{kKeep, 1, 0, 0}}, "operation 0 (forward_keep of stage 1): its input is not in memory"},
      {{{kForward, 0, 0, 0}, {kKeep, 0, 0, 0}}, "leaves the forward before unused"},
      {{{kKeep, 0, 0, 0}, {kForward, 0, 0, 0}}, "held already"},
      {{{kKeep, 0, 0, 0}, {kBackward, 0, 0, 0}}, "gradient of its output"},
      {{{kForward, 0, 0, 0}, {kForward, 1, 0, 0}, {kBackward, 1, 0, 0}}, "nothing was kept"},
      {{{kForward, 0, 0, 0}, {kKeep, 1, 0, 0}, {kFree, 1, 0, 0}}, "backward has not run"},
      {{{kKeep, 0, 0, 0}, {kKeep, 1, 0, 0}, {kBackward, 1, 0, 0}, {kFree, 1, 0, 0}}, "no slot"},
      {{{kForward, 0, 0, 0}, {kKeep, 1, 0, 0}, {kBackward, 1, 0, 0}, {kKeep, 0, 0, 0}},
       "held already"},
      {{{kForward, 0, 0, 0}, {kStore, 1, 0, 1}, {kKeep, 1, 0, 0}}, "another format"},
  };
  for (const auto& [operations, expected] : cases) {
    const Replay replay = simulate(two_stages(), operations);
    EXPECT_NE(replay.problem.find(expected), std::string::npos)
        << replay.problem << " instead of " << expected;
    EXPECT_THROW(schedule_from_operations(two_stages(), operations), std::logic_error);
  }
}

}  // namespace
}  // namespace headroom
