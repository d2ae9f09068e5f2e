#include <headroom/plan/schedule.h>

#include "plan/random_chain.h"

#include <headroom/core/error.h>
#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <random>

namespace headroom {
namespace {

ChainCosts equal_stages(int n) {
  ChainCosts chain;
  for (int l = 1; l <= n; ++l)
    chain.stages.push_back({"", 1, l == n ? 0 : 1, 1, 0, 0, {{3, 1, 2, 0, 0}}, {}});
  return chain;
}

std::int64_t extra_forwards(int n, const char* policy) {
  return schedule_of_policy(equal_stages(n), parse_policy(policy)).time_ns - 3 * n;
}

TEST(Policies, ParsesAndPrints) {
  for (const char* text : {"optimal", "none", "every", "segments=4", "sqrt", "log", "revolve=12"})
    EXPECT_EQ(parse_policy(text).to_string(), text);
  for (const char* text : {"", "all", "segments", "segments=", "segments=0", "segments=-1",
                           "segments=4x", "sqrt=3", "revolve=99999999999", "=4"}) {
    EXPECT_THROW(parse_policy(text), ConfigError) << text;
  }
}

TEST(Policies, RecomputeWhatTheirNamesSay) {
  EXPECT_EQ(extra_forwards(16, "none"), 0);
  EXPECT_EQ(extra_forwards(16, "every"), 15);
  EXPECT_EQ(extra_forwards(16, "segments=1"), 0);
  EXPECT_EQ(extra_forwards(16, "segments=4"), 12);
  EXPECT_EQ(extra_forwards(16, "sqrt"), 12);
  // 18 stages in 4 segments are 4, 5, 4 and 5; the last is not recomputed.
  EXPECT_EQ(extra_forwards(18, "segments=4"), 13);
  // Halving runs half of the stages again at each of log2(16) levels.
  EXPECT_EQ(extra_forwards(16, "log"), 32);
  EXPECT_EQ(extra_forwards(16, "revolve=15"), 15);
  EXPECT_EQ(extra_forwards(16, "revolve=1000"), 15);
  EXPECT_EQ(extra_forwards(16, "revolve=1"), 16 * 15 / 2);
}

TEST(Policies, TradeMemoryForTime) {
  const ChainCosts chain = equal_stages(64);
  const auto peak = [&](const char* policy) {
    return schedule_of_policy(chain, parse_policy(policy)).peak_bytes;
  };
  EXPECT_EQ(peak("none"), 64 * 3 + 1);
  EXPECT_LT(peak("every"), peak("none") / 2);
  EXPECT_LT(peak("sqrt"), peak("every"));
  EXPECT_LT(peak("log"), peak("sqrt"));
  EXPECT_LT(peak("revolve=2"), peak("log"));
}

TEST(Policies, AreValidOnAnyChain) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const ChainCosts chain = testing::random_chain(random, {20, 3, 2, 50, 50});
    for (const char* text :
         {"none", "every", "segments=1", "sqrt", "log", "revolve=1", "revolve=3", "revolve=30"}) {
      const Schedule plan = schedule_of_policy(chain, parse_policy(text));
      EXPECT_EQ(simulate(chain, plan.operations).problem, "");
    }
    if (chain.stages.size() >= 3) {
      EXPECT_EQ(
          simulate(chain, schedule_of_policy(chain, parse_policy("segments=3")).operations).problem,
          "");
    } else {
      EXPECT_THROW(schedule_of_policy(chain, parse_policy("segments=3")), ConfigError);
    }
  }
}

TEST(Policies, OptimalNeedsABudget) {
  EXPECT_THROW(schedule_of_policy(equal_stages(3), parse_policy("optimal")), std::invalid_argument);
}

}  // namespace
}  // namespace headroom
