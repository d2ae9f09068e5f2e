#include <headroom/plan/chain_solver.h>

#include "plan/oracle.h"
#include "plan/oracle_comparison.h"
#include "plan/random_chain.h"

#include <headroom/core/error.h>
#include <headroom/plan/schedule.h>
#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace headroom {
namespace {

using testing::random_chain;
using testing::RandomChainLimits;

StageCosts stage(std::int64_t output, std::int64_t grad, std::int64_t forward_ns,
                 std::int64_t transient, std::vector<StageOption> options) {
  return {"", output, grad, forward_ns, transient, 0, std::move(options), {}};
}

constexpr std::int64_t kInfeasible = -1;

std::int64_t time_at(ChainSolver& solver, std::int64_t budget_bytes) {
  if (budget_bytes < solver.smallest_budget_bytes()) {
    EXPECT_THROW(solver.schedule(budget_bytes), BudgetError);
    return kInfeasible;
  }
  const Schedule plan = solver.schedule(budget_bytes);
  EXPECT_LE(plan.peak_bytes, budget_bytes);
  EXPECT_EQ(plan.certified_gap_ns, 0);
  EXPECT_EQ(simulate(solver.chain(), plan.operations).problem, "");
  return plan.time_ns;
}

/// n equal steps of which one at a time can be kept, and c snapshots: the setting of Revolve.
ChainCosts revolve_chain(int n, std::int64_t kept_bytes) {
  ChainCosts chain;
  for (int l = 0; l < n; ++l) chain.stages.push_back(stage(1, 0, 1, 0, {{kept_bytes, 1, 0, 0, 0}}));
  return chain;
}

TEST(ChainSolver, MatchesRevolve) {
  const std::vector<std::vector<int>> cases = {{5, 2, 6},      {10, 3, 15},    {14, 3, 27},
                                               {20, 4, 39},    {50, 5, 122},   {100, 5, 316},
                                               {100, 10, 222}, {250, 25, 473}, {1000, 10, 3636}};
  for (const std::vector<int>& values : cases) {
    const int n = values[0], c = values[1], extra = values[2];
    for (const std::int64_t kept_bytes : {std::int64_t{2} * n, std::int64_t{1000000}}) {
      ChainSolver solver(revolve_chain(n, kept_bytes));
      const Schedule plan = solver.schedule(kept_bytes + c);
      EXPECT_EQ(plan.time_ns - n, extra) << n << " steps, " << c << " snapshots";
      EXPECT_EQ(plan.certified_gap_ns, 0);
    }
    const Schedule fixed = schedule_of_policy(revolve_chain(n, 1000000), {PolicyKind::kRevolve, c});
    EXPECT_EQ(fixed.time_ns - n, extra);
    EXPECT_EQ(fixed.peak_bytes, 1000000 + c);
  }
}

TEST(ChainSolver, EqualStages) {
  const auto equal = [](int n) {
    ChainCosts chain;
    for (int l = 1; l <= n; ++l)
      chain.stages.push_back(stage(1, l == n ? 0 : 1, 1, 0, {{3, 1, 2, 0, 0}}));
    return chain;
  };
  const std::map<int, std::vector<int>> expected = {
      {4, {-1, 16, 15, 14, 14, 14, 13, 13, 12, 12}},
      {8,
       {-1, 46, 36, 33, 31, 30, 30, 29, 29, 28, 28, 28, 27, 27, 27, 26, 26, 26, 25, 25, 24, 24}}};
  for (const auto& [n, times] : expected) {
    ChainSolver solver(equal(n));
    EXPECT_EQ(solver.smallest_budget_bytes(), 6);
    for (std::size_t i = 0; i < times.size(); ++i)
      EXPECT_EQ(time_at(solver, 5 + static_cast<std::int64_t>(i)), times[i])
          << n << " at " << 5 + i;
  }
}

ChainCosts mixed_chain() {
  ChainCosts chain;
  chain.stages = {stage(4, 4, 3, 1, {{10, 3, 6, 1, 2}}),
                  stage(4, 4, 5, 1, {{12, 5, 10, 1, 2}, {7, 5, 13, 2, 4}}),
                  stage(2, 2, 2, 0, {{5, 2, 4, 0, 1}}),
                  stage(2, 2, 6, 1, {{6, 6, 12, 1, 1}, {3, 6, 15, 1, 2}}),
                  stage(1, 0, 1, 0, {{1, 1, 2, 0, 0}})};
  return chain;
}

TEST(ChainSolver, MixedStagesWithOptions) {
  const std::vector<int> times = {-1, 62, 59, 59, 59, 57, 57, 56, 56,
                                  56, 54, 54, 54, 53, 53, 53, 51, 51};
  ChainSolver solver(mixed_chain());
  EXPECT_EQ(solver.smallest_budget_bytes(), 23);
  for (std::size_t i = 0; i < times.size(); ++i)
    EXPECT_EQ(time_at(solver, 22 + static_cast<std::int64_t>(i)), times[i]) << 22 + i;
}

TEST(ChainSolver, FrontierIsWhereTheTimeChanges) {
  ChainSolver solver(mixed_chain());
  const std::vector<std::pair<int, int>> expected = {{23, 62}, {24, 59}, {27, 57}, {29, 56},
                                                     {32, 54}, {35, 53}, {38, 51}};
  const std::vector<FrontierPoint> points = solver.frontier();
  EXPECT_TRUE(solver.frontier_is_exact());
  ASSERT_EQ(points.size(), expected.size());
  EXPECT_EQ(solver.schedule(37).peak_bytes, 35);  // no more than the time asks for
  for (std::size_t i = 0; i < points.size(); ++i) {
    EXPECT_EQ(points[i].budget_bytes, expected[i].first);
    EXPECT_EQ(points[i].time_ns, expected[i].second);
    EXPECT_EQ(points[i].peak_bytes, solver.schedule(points[i].budget_bytes).peak_bytes);
  }
}

/// Each item is a stage that either keeps `memory` bytes or pays `value` again; sweeps are too slow
/// to help.
std::int64_t knapsack(const std::vector<std::int64_t>& memory,
                      const std::vector<std::int64_t>& value, std::int64_t capacity) {
  ChainCosts chain;
  std::int64_t total = 0;
  for (const std::int64_t v : value) total += v;
  for (std::size_t i = 0; i < memory.size(); ++i)
    chain.stages.push_back(
        stage(0, 0, total + 1, 0, {{0, value[i], 0, 0, 0}, {memory[i], 0, 0, 0, 0}}));
  return total - ChainSolver(chain).schedule(capacity).time_ns;
}

TEST(ChainSolver, SolvesKnapsacks) {
  EXPECT_EQ(knapsack({2, 3, 2, 4, 1}, {1, 2, 1, 3, 2}, 5), 5);
  EXPECT_EQ(knapsack({1, 2, 3}, {10, 20, 30}, 1), 10);
  EXPECT_EQ(knapsack({0, 2, 3}, {5, 2, 3}, 5), 10);
  EXPECT_EQ(knapsack({100, 200, 300}, {1000, 2000, 3000}, 500), 5000);
  EXPECT_EQ(knapsack({10, 20, 30}, {1, 2, 3}, 5), 0);
  EXPECT_EQ(knapsack({10001, 50000}, {1, 1}, 10000), 0);
}

TEST(ChainSolver, MatchesTheOracle) {
  std::mt19937_64 random(1);
  testing::compare_with_oracle(random, 400, {4, 3, 2, 12, 12});
  testing::compare_with_oracle(random, 40, {6, 2, 1, 12, 12});
  testing::compare_with_oracle(random, 300, {5, 2, 2, 12, 12, true});
}

TEST(ChainSolver, CountsWhatStagesCarryOnce) {
  std::mt19937_64 random(16);
  testing::compare_with_oracle(random, 400, {5, 2, 0, 12, 12, false, 3});
  testing::compare_with_oracle(random, 200, {5, 2, 2, 12, 12, true, 3});
}

TEST(ChainSolver, NeverSlowerWithMoreMemory) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 100; ++i) {
    ChainSolver solver(random_chain(random, {12, 3, 2, 20, 20}));
    const std::int64_t floor = solver.smallest_budget_bytes(), ample = solver.ample_budget_bytes();
    std::int64_t before = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t budget = floor; budget <= ample + 1; ++budget) {
      const Schedule plan = solver.schedule(budget);
      EXPECT_LE(plan.time_ns, before);
      EXPECT_LE(plan.peak_bytes, budget);
      EXPECT_GE(plan.time_ns, solver.least_time_ns());
      before = plan.time_ns;
    }
    EXPECT_EQ(before, solver.least_time_ns());
  }
}

TEST(ChainSolver, FrontierAgreesWithSinglePlans) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 100; ++i) {
    ChainSolver solver(random_chain(random, {8, 3, 2, 20, 20}));
    std::map<std::int64_t, std::int64_t> expected;  // budget -> time, where it changes
    for (std::int64_t budget = solver.smallest_budget_bytes();
         budget <= solver.ample_budget_bytes(); ++budget) {
      const std::int64_t time_ns = solver.schedule(budget).time_ns;
      if (expected.empty() || time_ns < expected.rbegin()->second) expected[budget] = time_ns;
    }
    const std::vector<FrontierPoint> points = solver.frontier();
    ASSERT_EQ(points.size(), expected.size());
    for (const FrontierPoint& point : points) {
      EXPECT_EQ(expected[point.budget_bytes], point.time_ns);
      EXPECT_EQ(solver.schedule(point.budget_bytes).peak_bytes, point.peak_bytes);
    }
  }
}

TEST(ChainSolver, ScalingBytesChangesNothing) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 100; ++i) {
    ChainCosts chain = random_chain(random, {8, 3, 0, 20, 20});
    ChainCosts scaled = chain;
    const std::int64_t factor = std::int64_t{1} << (20 + random() % 24);
    scaled.input_grad_bytes *= factor;
    for (StageCosts& s : scaled.stages) {
      for (std::int64_t* value :
           {&s.output_bytes, &s.grad_bytes, &s.forward_transient_bytes, &s.param_grad_bytes})
        *value *= factor;
      for (StageOption& o : s.options) {
        for (std::int64_t* value :
             {&o.kept_bytes, &o.forward_transient_bytes, &o.backward_transient_bytes})
          *value *= factor;
      }
    }
    ChainSolver small(chain), large(scaled);
    ASSERT_EQ(small.smallest_budget_bytes() * factor, large.smallest_budget_bytes());
    for (std::int64_t budget = small.smallest_budget_bytes(); budget <= small.ample_budget_bytes();
         budget += 3) {
      EXPECT_EQ(small.schedule(budget).time_ns, large.schedule(budget * factor).time_ns);
      EXPECT_EQ(small.schedule(budget).operations,
                large.schedule(budget * factor + factor - 1).operations);
    }
  }
}

SolverOptions options_of(bool prune, bool intern) {
  SolverOptions options;
  options.prune = prune;
  options.intern = intern;
  return options;
}

TEST(ChainSolver, PruningAndInterningChangeNothing) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 150; ++i) {
    ChainCosts chain = random_chain(random, {10, 3, 2, 20, 20});
    // Repeat a piece, so that there is something to share.
    const std::vector<StageCosts> piece = chain.stages;
    for (std::uint64_t repeat = 0; repeat < random() % 4; ++repeat)
      chain.stages.insert(chain.stages.end(), piece.begin(), piece.end());
    ChainSolver fast(chain), unpruned(chain, options_of(false, true)),
        plain(chain, options_of(false, false));
    EXPECT_EQ(fast.smallest_budget_bytes(), plain.smallest_budget_bytes());
    const std::int64_t range = fast.ample_budget_bytes() - fast.smallest_budget_bytes() + 1;
    for (int k = 0; k < 5; ++k) {
      const std::int64_t budget =
          fast.smallest_budget_bytes() +
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(range));
      const Schedule plan = fast.schedule(budget);
      EXPECT_EQ(plan.time_ns, unpruned.schedule(budget).time_ns);
      EXPECT_EQ(plan.operations, plain.schedule(budget).operations);
    }
  }
}

TEST(ChainSolver, AnotherOptionNeverHurts) {
  std::mt19937_64 random(6);
  for (int i = 0; i < 100; ++i) {
    const ChainCosts chain = random_chain(random, {8, 2, 1, 20, 20});
    ChainCosts richer = chain;
    richer.stages[random() % chain.stages.size()].options.push_back(
        {static_cast<std::int64_t>(random() % 30), static_cast<std::int64_t>(random() % 20),
         static_cast<std::int64_t>(random() % 40), 0, 0});
    richer.boundary_formats.push_back({"extra", 0.5, 0.25, 0.25});
    ChainSolver before(chain), after(richer);
    EXPECT_LE(after.smallest_budget_bytes(), before.smallest_budget_bytes());
    for (std::int64_t budget = before.smallest_budget_bytes();
         budget <= before.ample_budget_bytes(); budget += 2) {
      EXPECT_LE(after.schedule(budget).time_ns, before.schedule(budget).time_ns);
    }
  }
}

TEST(ChainSolver, RoundingIsBracketed) {
  std::mt19937_64 random(7);
  int num_gaps = 0;
  for (int i = 0; i < 150; ++i) {
    const ChainCosts chain = random_chain(random, {9, 3, 2, 400, 1000});
    ChainSolver exact(chain);
    // A table too small for slots of one byte, but wide enough to plan with.
    ChainSolver rounded(chain, {16, 0, 8 * 1500, true, true});
    const std::int64_t range = exact.ample_budget_bytes() - exact.smallest_budget_bytes() + 1;
    for (int k = 0; k < 4; ++k) {
      const std::int64_t budget =
          exact.smallest_budget_bytes() +
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(range));
      const Schedule best = exact.schedule(budget), plan = rounded.schedule(budget);
      ASSERT_EQ(best.certified_gap_ns, 0);
      EXPECT_LE(plan.peak_bytes, budget);
      EXPECT_GE(plan.time_ns, best.time_ns);
      EXPECT_LE(plan.time_ns - plan.certified_gap_ns, best.time_ns);
      num_gaps += plan.certified_gap_ns > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(num_gaps, 50);
}

TEST(ChainSolver, OddTransientsLoseNothingWhereWhatIsKeptIsEven) {
  std::mt19937_64 random(10);
  for (int i = 0; i < 60; ++i) {
    ChainCosts chain = random_chain(random, {9, 3, 0, 12, 20});
    const auto odd = [&] { return static_cast<std::int64_t>(random() % 3000); };
    for (StageCosts& s : chain.stages) {
      for (std::int64_t* value : {&s.output_bytes, &s.param_grad_bytes}) *value *= 1000;
      s.grad_bytes = s.grad_bytes * 1000 + odd();
      s.forward_transient_bytes += odd();
      for (StageOption& o : s.options) {
        o.kept_bytes *= 1000;
        o.forward_transient_bytes += odd();
        o.backward_transient_bytes += odd();
      }
    }
    ChainSolver bytewise(chain, {std::int64_t{1} << 40, 0, std::int64_t{1} << 30, true, true});
    ChainSolver slotted(
        chain, {1000, 0, std::int64_t{1} << 30, true, true});  // too few slots for single bytes
    const std::int64_t floor = bytewise.smallest_budget_bytes(),
                       range = bytewise.ample_budget_bytes() - floor + 1;
    for (int k = 0; k < 6; ++k) {
      const std::int64_t budget =
          floor + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(range));
      const Schedule plan = slotted.schedule(budget);
      EXPECT_EQ(plan.certified_gap_ns, 0);
      EXPECT_EQ(plan.time_ns, bytewise.schedule(budget).time_ns);
    }
  }
}

TEST(ChainSolver, SurvivesTheLargestSizes) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 30; ++i) {
    ChainCosts chain =
        random_chain(random, {20, 3, 2, (std::int64_t{1} << 50) / 3, (std::int64_t{1} << 50) / 2});
    ChainSolver solver(chain);
    const std::int64_t floor = solver.smallest_budget_bytes(), ample = solver.ample_budget_bytes();
    ASSERT_GE(floor, 0);
    ASSERT_LE(floor, ample);
    for (const std::int64_t budget :
         {floor, floor + (ample - floor) / 3, ample, std::numeric_limits<std::int64_t>::max()}) {
      const Schedule plan = solver.schedule(budget);
      EXPECT_LE(plan.peak_bytes, budget);
      EXPECT_GE(plan.certified_gap_ns, 0);
      EXPECT_GE(plan.time_ns, solver.least_time_ns());
    }
  }
}

TEST(ChainSolver, NeverSlowerThanAFixedPolicy) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 150; ++i) {
    ChainSolver solver(random_chain(random, {16, 3, 1, 30, 30}));
    for (const char* text :
         {"none", "every", "sqrt", "log", "segments=1", "revolve=1", "revolve=2", "revolve=3"}) {
      const Schedule fixed = schedule_of_policy(solver.chain(), parse_policy(text));
      EXPECT_LE(solver.schedule(fixed.peak_bytes).time_ns, fixed.time_ns) << text;
    }
  }
}

}  // namespace
}  // namespace headroom
