#pragma once

#include "plan/oracle.h"
#include "plan/random_chain.h"

#include <headroom/core/error.h>
#include <headroom/plan/chain_solver.h>
#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace headroom::testing {

/// Compares planner and oracle on random chains, each at four budgets between just below the floor
/// and just above "keep everything".
inline void compare_with_oracle(std::mt19937_64& random, int num_chains,
                                const RandomChainLimits& limits) {
  for (int i = 0; i < num_chains && !::testing::Test::HasFailure(); ++i) {
    const ChainCosts chain = random_chain(random, limits);
    ChainSolver solver(chain);
    Oracle oracle(chain);
    const std::int64_t floor = solver.smallest_budget_bytes(), ample = solver.ample_budget_bytes();
    ASSERT_EQ(oracle.solve(floor - 1), Oracle::kInfeasible)
        << "chain " << i << " fits below the floor " << floor;
    for (int k = 0; k < 4; ++k) {
      const std::int64_t budget =
          k == 0 ? floor
                 : floor + static_cast<std::int64_t>(random() %
                                                     static_cast<std::uint64_t>(ample - floor + 2));
      const Schedule plan = solver.schedule(budget);
      const Replay replay = simulate(chain, plan.operations);
      const Oracle::Cost followed = oracle.replay(plan.operations);
      ASSERT_EQ(plan.time_ns, oracle.solve(budget))
          << "chain " << i << " of " << chain.stages.size() << " stages at " << budget;
      ASSERT_EQ(plan.certified_gap_ns, 0);
      ASSERT_EQ(replay.problem, "");
      ASSERT_EQ(replay.time_ns, plan.time_ns);
      ASSERT_EQ(replay.peak_bytes, plan.peak_bytes);
      ASSERT_LE(plan.peak_bytes, budget);
      ASSERT_TRUE(followed.valid);
      ASSERT_EQ(followed.time_ns, plan.time_ns);
      ASSERT_EQ(followed.peak_bytes, plan.peak_bytes);
    }
  }
}

}  // namespace headroom::testing
