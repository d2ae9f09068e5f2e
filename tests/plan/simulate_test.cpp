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

// Three stages whose boundaries are on disk: 10 bytes take 20 ns to come, and up to half of the
// time of the operation before hides that.
ChainCosts spilling_stages() {
  ChainCosts chain;
  chain.stages.push_back({"one", 10, 20, 1, 5, 0, {{100, 2, 3, 7, 9}}, {}});
  chain.stages.push_back({"two", 10, 20, 1, 5, 0, {{100, 2, 3, 7, 9}}, {}});
  chain.stages.push_back({"three", 1, 0, 4, 0, 0, {{200, 5, 12, 8, 11}}, {}});
  chain.boundary_formats.push_back({"disk", 0, 0, 2, 0, 0.5});
  return chain;
}

std::vector<Operation> spilling_operations() {
  return {{kForward, 0, 0, 0}, {kStore, 1, 0, 1},   {kKeep, 2, 0, 1},     {kBackward, 2, 0, 1},
          {kFree, 2, 0, 1},    {kKeep, 1, 0, 1},    {kBackward, 1, 0, 1}, {kFree, 1, 0, 1},
          {kKeep, 0, 0, 0},    {kBackward, 0, 0, 0}};
}

TEST(FoundInputs, SaveTheTimeOfReadingWhereThereIsRoom) {
  const ChainCosts chain = spilling_stages();
  const Schedule plain = schedule_from_operations(chain, spilling_operations());
  EXPECT_EQ(plain.time_ns, 1 + 1 + 5 + 12 + 2 + 3 + 2 + 3 + 5 * 20);
  const Schedule found = with_found_inputs(chain, plain, 1000);
  // Heads, and inputs that stay for backward, need not be read; half of the backward of stage 2
  // hides a part of reading the input of stage 1.
  EXPECT_EQ(found.time_ns, plain.time_ns - 4 * 20 - 12 / 2);
  EXPECT_TRUE(found.operations[5].finds_input);
  EXPECT_EQ(found.curve[3].peak_bytes, plain.curve[3].peak_bytes + 10);
  EXPECT_EQ(found.curve[4].live_bytes, plain.curve[4].live_bytes + 10);
  EXPECT_EQ(found.curve[5].peak_bytes, plain.curve[5].peak_bytes);
  std::int64_t sum_ns = 0;
  for (const OperationBytes& operation : found.curve) sum_ns += operation.ns;
  EXPECT_EQ(sum_ns, found.time_ns);
}

TEST(FoundInputs, StayInsideTheBudget) {
  const ChainCosts chain = spilling_stages();
  const Schedule plain = schedule_from_operations(chain, spilling_operations());
  const Schedule found = with_found_inputs(chain, plain, plain.peak_bytes);
  EXPECT_EQ(found.peak_bytes, plain.peak_bytes);
  EXPECT_FALSE(found.operations[5].finds_input) << "there is no room beside the largest operation";
  EXPECT_TRUE(found.operations[6].finds_input);
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
