#include "plan/grouped_chain.h"

#include "plan/random_chain.h"
#include "plan/simulate.h"

#include <headroom/plan/chain_solver.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>

namespace headroom {
namespace {

ChainCosts chain_of(std::mt19937_64& random, std::size_t num_stages, int max_formats = 2) {
  testing::RandomChainLimits limits;
  limits.max_bytes = 40;
  limits.max_formats = max_formats;
  ChainCosts chain = testing::random_chain(random, limits);
  while (chain.stages.size() < num_stages) {
    const ChainCosts more = testing::random_chain(random, limits);
    chain.stages.insert(chain.stages.end(), more.stages.begin(), more.stages.end());
  }
  chain.stages.resize(num_stages);
  return chain;
}

TEST(GroupedChain, ExpandsToSchedulesOfTheChainThatFit) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 40; ++i) {
    const ChainCosts chain = chain_of(random, 12);
    const GroupedChain grouped(chain, 4);
    ChainSolver groups(grouped.groups()), stages(chain);
    const std::int64_t floor = groups.smallest_budget_bytes();
    const std::int64_t room = groups.ample_budget_bytes() - floor;
    EXPECT_GE(floor, stages.smallest_budget_bytes());
    EXPECT_EQ(groups.least_time_ns(), stages.least_time_ns());
    for (const std::int64_t budget : {floor, floor + room / 4, floor + room / 2, floor + room}) {
      const Replay replay = simulate(chain, grouped.expand(groups.schedule(budget).operations));
      ASSERT_EQ(replay.problem, "") << "chain " << i << " at " << budget;
      EXPECT_LE(replay.peak_bytes, budget) << "chain " << i;
      EXPECT_GE(replay.time_ns, stages.schedule(budget).time_ns) << "chain " << i;
    }
  }
}

TEST(GroupedChain, NothingIsFasterThanTheBound) {
  std::mt19937_64 random(12);
  for (int i = 0; i < 60; ++i) {
    const ChainCosts chain = chain_of(random, 8);
    ChainSolver solver(chain);
    const std::int64_t floor = solver.smallest_budget_bytes();
    const std::int64_t ample = solver.ample_budget_bytes();
    for (const std::int64_t budget : {floor, (floor + ample) / 2, ample})
      EXPECT_LE(least_time_within(chain, budget), solver.schedule(budget).time_ns) << "chain " << i;
    EXPECT_EQ(least_time_within(chain, ample), solver.least_time_ns());
  }
}

TEST(ChainSolver, PlansAThousandDifferentStagesInGroups) {
  std::mt19937_64 random(13);
  const ChainCosts chain = chain_of(random, 1000, /*max_formats=*/0);
  SolverOptions options;
  options.max_slots = 200;
  options.max_lossless_work = 1000;
  ChainSolver solver(chain, options);
  EXPECT_FALSE(solver.frontier_is_exact());
  const std::int64_t floor = solver.smallest_budget_bytes();
  const std::int64_t ample = solver.ample_budget_bytes();
  for (const std::int64_t budget : {floor, floor + (ample - floor) / 4, ample}) {
    const Schedule schedule = solver.schedule(budget);
    EXPECT_LE(schedule.peak_bytes, budget);
    EXPECT_EQ(simulate(chain, schedule.operations).time_ns, schedule.time_ns);
    EXPECT_GE(schedule.certified_gap_ns, 0);
    EXPECT_LE(schedule.certified_gap_ns, schedule.time_ns - solver.least_time_ns());
  }
  EXPECT_EQ(solver.schedule(ample).time_ns, solver.least_time_ns());
  EXPECT_EQ(solver.schedule(ample).certified_gap_ns, 0);
}

}  // namespace
}  // namespace headroom
