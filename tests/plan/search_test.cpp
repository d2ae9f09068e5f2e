#include <headroom/plan/search.h>

#include "plan/random_chain.h"
#include "plan/realistic_chains.h"

#include <headroom/core/error.h>
#include <headroom/plan/schedule.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <string>

namespace headroom {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// A chain for one sample made into one for `batch`: sizes grow with it, times grow but for a fixed
/// part.
ChainCosts times_batch(ChainCosts chain, std::int64_t batch) {
  for (StageCosts& stage : chain.stages) {
    for (std::int64_t* bytes :
         {&stage.output_bytes, &stage.grad_bytes, &stage.forward_transient_bytes})
      *bytes *= batch;
    stage.forward_ns = stage.forward_ns * batch + 3;
    for (StageOption& option : stage.options) {
      for (std::int64_t* bytes :
           {&option.kept_bytes, &option.forward_transient_bytes, &option.backward_transient_bytes})
        *bytes *= batch;
      option.forward_ns = option.forward_ns * batch + 3;
      option.backward_ns = option.backward_ns * batch + 3;
    }
  }
  return chain;
}

/// The request without pruning: every number of steps, every choice, and one schedule at a time.
std::optional<std::int64_t> least_time(const PlanRequest& request) {
  std::optional<std::int64_t> best;
  for (std::int64_t steps = 1; steps <= request.num_samples; ++steps) {
    for (const StaticChoice& choice : request.choices) {
      if (choice.max_accumulation_steps > 0 && steps > choice.max_accumulation_steps) continue;
      const std::int64_t largest = (request.num_samples + steps - 1) / steps;
      const MicroBatchCosts costs = *request.costs(largest, choice);
      const std::int64_t fixed = choice.bytes.total() + costs.input_bytes;
      std::int64_t time = choice.optimizer_ns,
                   update = choice.bytes.total() + choice.optimizer_transient_bytes;
      for (const StageCosts& stage : costs.chain.stages) update += stage.param_grad_bytes;
      bool fits = update <= request.budget_bytes;
      for (std::int64_t step = 0; step < steps && fits; ++step) {
        const std::int64_t size =
            request.num_samples / steps + (step < request.num_samples % steps ? 1 : 0);
        ChainSolver solver(request.costs(size, choice)->chain);
        fits = solver.smallest_budget_bytes() <= request.budget_bytes - fixed;
        if (fits) time += solver.schedule(request.budget_bytes - fixed).time_ns;
      }
      if (fits && (!best || time < *best)) best = time;
    }
  }
  return best;
}

PlanRequest random_request(std::mt19937_64& random) {
  ChainCosts chain = testing::random_chain(random, {5, 3, 1, 10, 20});
  chain.input_grad_bytes = 0;
  PlanRequest request;
  request.num_samples = 1 + static_cast<std::int64_t>(random() % 12);
  request.choices = {{GradientMode::kPreallocated, {20, 10, 20, 1}, 40, 3, 0},
                     {GradientMode::kPreallocated, {20, 10, 2, 1}, 60, 5, 0},
                     {GradientMode::kUpdatedInBackward, {20, 0, 20, 1}, 45, 0, 1}};
  request.costs = [chain](std::int64_t size, const StaticChoice& choice) {
    ChainCosts costs = times_batch(chain, size);
    return MicroBatchCosts{choice.gradients == GradientMode::kUpdatedInBackward
                               ? with_update_in_backward(costs)
                               : with_gradients_allocated(costs),
                           2 * size};
  };
  return request;
}

TEST(MakePlan, EqualsTheSearchWithoutPruning) {
  std::mt19937_64 random(1);
  int num_fit = 0;
  for (int i = 0; i < 300; ++i) {
    PlanRequest request = random_request(random);
    request.budget_bytes = 30 + static_cast<std::int64_t>(random() % 300);
    const std::optional<std::int64_t> expected = least_time(request);
    if (!expected) {
      EXPECT_THROW(make_plan(request), BudgetError);
      continue;
    }
    ++num_fit;
    const BatchPlan plan = make_plan(request);
    EXPECT_EQ(plan.time_ns, *expected);
    EXPECT_EQ(plan.certified_gap_ns, 0);
    EXPECT_LE(plan.peak_bytes, request.budget_bytes);
    std::int64_t samples = 0, steps = 0;
    for (const PlannedMicroBatches& group : plan.micro_batches) {
      samples += group.size * group.count;
      steps += group.count;
    }
    EXPECT_EQ(samples, request.num_samples);
    EXPECT_EQ(steps, plan.accumulation_steps);
  }
  EXPECT_GT(num_fit, 150);
}

TEST(MakePlan, TheFloorIsTheSmallestBudgetThatFits) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 200; ++i) {
    PlanRequest request = random_request(random);
    const BudgetFloor floor = find_floor(request);
    const std::int64_t parts = floor.static_bytes.total() +
                               std::max(floor.input_bytes + floor.stage_bytes, floor.update_bytes);
    EXPECT_EQ(parts, floor.bytes);
    request.budget_bytes = floor.bytes;
    EXPECT_LE(make_plan(request).peak_bytes, floor.bytes);
    request.budget_bytes = floor.bytes - 1;
    EXPECT_THROW(make_plan(request), BudgetError);
  }
}

PlanRequest gpt2_request(std::int64_t budget_bytes, std::int64_t num_samples) {
  PlanRequest request;
  request.budget_bytes = budget_bytes;
  request.num_samples = num_samples;
  const std::int64_t weights = std::int64_t{124439808} * 4;
  request.choices = {
      {GradientMode::kPreallocated, {weights, weights, 2 * weights, 0}, 300000000, 0, 0}};
  request.costs = [](std::int64_t size, const StaticChoice&) {
    return MicroBatchCosts{with_gradients_allocated(testing::gpt2_chain(size)), size * 1024 * 16};
  };
  return request;
}

TEST(MakePlan, MoreMemoryNeverSlowsAndTheSameRequestGivesTheSamePlan) {
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t mib : {2400, 3000, 4000, 6000, 12000}) {
    const BatchPlan plan = make_plan(gpt2_request(mib * kMiB, 24));
    EXPECT_LE(plan.peak_bytes, mib * kMiB);
    EXPECT_LE(plan.time_ns - plan.certified_gap_ns, before);
    EXPECT_LE(plan.num_solved, plan.num_candidates);
    before = plan.time_ns;
    const BatchPlan again = make_plan(gpt2_request(mib * kMiB, 24));
    ASSERT_EQ(again.micro_batches.size(), plan.micro_batches.size());
    for (std::size_t i = 0; i < plan.micro_batches.size(); ++i) {
      EXPECT_EQ(again.micro_batches[i].size, plan.micro_batches[i].size);
      EXPECT_EQ(again.micro_batches[i].schedule.operations,
                plan.micro_batches[i].schedule.operations);
    }
  }
}

TEST(MakePlan, SplitsUnevenBatchesInBalance) {
  PlanRequest request = gpt2_request(100000 * kMiB, 23);
  request.accumulation_steps = 4;
  const BatchPlan plan = make_plan(request);
  ASSERT_EQ(plan.micro_batches.size(), 2u);
  EXPECT_EQ(plan.micro_batches[0].size, 6);
  EXPECT_EQ(plan.micro_batches[0].count, 3);
  EXPECT_EQ(plan.micro_batches[1].size, 5);
  EXPECT_EQ(plan.micro_batches[1].count, 1);
  request.accumulation_steps = 0;
  request.micro_batch_size = 10;
  EXPECT_EQ(make_plan(request).accumulation_steps, 3);
  EXPECT_EQ(make_plan(request).micro_batches[0].size, 8);
}

TEST(MakePlan, UpdatesInsideBackwardOnlyWithOneMicroBatch) {
  PlanRequest request = gpt2_request(100000 * kMiB, 4);
  const std::int64_t weights = request.choices[0].bytes.weights;
  request.choices.push_back(
      {GradientMode::kUpdatedInBackward, {weights, 0, 2 * weights, 0}, 1000, 0, 1});
  request.costs = [](std::int64_t size, const StaticChoice& choice) {
    const ChainCosts chain = testing::gpt2_chain(size);
    return MicroBatchCosts{choice.max_accumulation_steps == 1 ? with_update_in_backward(chain)
                                                              : with_gradients_allocated(chain),
                           0};
  };
  BatchPlan plan = make_plan(request);
  EXPECT_EQ(plan.choice, 1u);
  EXPECT_EQ(plan.gradients, GradientMode::kUpdatedInBackward);
  EXPECT_EQ(plan.accumulation_steps, 1);
  request.accumulation_steps = 2;
  EXPECT_EQ(make_plan(request).choice, 0u);
}

TEST(MakePlan, TheUpdateHasItsOwnPeak) {
  PlanRequest request = gpt2_request(1, 1);
  request.choices[0].optimizer_transient_bytes = 5000 * kMiB;
  const BudgetFloor floor = find_floor(request);
  EXPECT_EQ(floor.bytes, floor.static_bytes.total() + 5000 * kMiB) << "the inputs are gone by then";
  request.budget_bytes = floor.bytes;
  const BatchPlan plan = make_plan(request);
  EXPECT_EQ(plan.peaks.update_bytes, floor.bytes);
  EXPECT_LE(plan.peaks.backward_bytes, floor.bytes);
  EXPECT_GT(plan.peaks.forward_bytes, floor.static_bytes.total());
}

TEST(MakePlan, LeavesOutSizesThatAreKnownNotToFit) {
  PlanRequest request = gpt2_request(100000 * kMiB, 24);
  ASSERT_EQ(make_plan(request).largest().size, 24);
  request.costs = [known = request.costs](std::int64_t size, const StaticChoice& choice) {
    return size > 7 ? std::nullopt : known(size, choice);
  };
  EXPECT_EQ(make_plan(request).largest().size, 6) << "24 as 4 micro-batches";
  request.micro_batch_size = 12;
  EXPECT_THROW(make_plan(request), BudgetError);
}

TEST(MakePlan, NoScheduleHasAnOptionThatDoesNotFit) {
  ChainCosts chain = testing::gpt2_chain(4);
  for (StageCosts& stage : chain.stages) {
    StageOption unfit = stage.options.front();
    unfit.fits = false;  // and its numbers mean nothing
    unfit.kept_bytes = unfit.forward_ns = unfit.backward_ns = 0;
    stage.options.insert(stage.options.begin(), unfit);
  }
  ChainSolver solver(chain), plain(testing::gpt2_chain(4));
  EXPECT_EQ(solver.smallest_budget_bytes(), plain.smallest_budget_bytes());
  EXPECT_EQ(solver.ample_budget_bytes(), plain.ample_budget_bytes());
  for (const std::int64_t budget : {solver.smallest_budget_bytes(), solver.ample_budget_bytes()}) {
    const Schedule schedule = solver.schedule(budget);
    for (const Operation& operation : schedule.operations)
      if (operation.kind == OperationKind::kForwardKeep) {
        EXPECT_GT(operation.option, 0);
      }
    EXPECT_EQ(schedule.time_ns, plain.schedule(budget).time_ns);
  }
}

TEST(MakePolicyPlan, IsAsLargeAsItIs) {
  PlanRequest request = gpt2_request(1, 10);
  request.micro_batch_size = 4;
  const BatchPlan plan = make_policy_plan(request, parse_policy("every"));
  EXPECT_EQ(plan.accumulation_steps, 3);
  EXPECT_EQ(plan.largest().size, 4);
  EXPECT_EQ(plan.peak_bytes, plan.peaks.largest());
  EXPECT_GT(plan.peak_bytes, request.choices[0].bytes.total());
  request.costs = [](std::int64_t, const StaticChoice&) { return std::nullopt; };
  EXPECT_THROW(make_policy_plan(request, parse_policy("every")), BudgetError);
}

TEST(MakePlan, SaysWhichFloorWasHitAndWhatWouldHelp) {
  PlanRequest request = gpt2_request(512 * kMiB, 64);
  request.micro_batch_size = 8;
  request.remedies = {{"choose --optim adafactor", 900 * kMiB}};
  const BudgetFloor floor = find_floor(request);
  try {
    make_plan(request);
    FAIL() << "planned below the floor";
  } catch (const BudgetError& error) {
    const std::string text = error.what();
    for (const std::string& part :
         {std::string("budget 512.00 MiB is below the"), std::string("weights 474.70 MiB"),
          std::string("gradients 474.70 MiB"), std::string("optimizer 949.40 MiB"),
          std::string("one stage"), std::string("inputs 128.00 KiB"), std::to_string(floor.bytes),
          std::string("micro-batches of 1 sample"),
          std::string("choose --optim adafactor (saves 900.00 MiB)")}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
}

TEST(MakePlan, RefusesRequestsWithoutSense) {
  PlanRequest request = gpt2_request(kMiB, 0);
  EXPECT_THROW(make_plan(request), ConfigError);
  request = gpt2_request(kMiB, 4);
  request.accumulation_steps = 5;
  EXPECT_THROW(make_plan(request), ConfigError);
  request.accumulation_steps = 2;
  request.micro_batch_size = 1;
  EXPECT_THROW(make_plan(request), ConfigError);
  request = gpt2_request(kMiB, 4);
  request.choices[0].max_accumulation_steps = 1;
  request.accumulation_steps = 2;
  EXPECT_THROW(make_plan(request), ConfigError);
  request.choices.clear();
  EXPECT_THROW(make_plan(request), ConfigError);
  request = gpt2_request(kMiB, 4);
  request.choices[0].bytes.weights = -1;
  EXPECT_THROW(make_plan(request), ConfigError);
}

TEST(RealisticChains, NeverSlowerThanAFixedPolicyThatFits) {
  for (const ChainCosts& chain :
       {testing::gpt2_chain(4), testing::resnet50_like_chain(32), testing::u_shaped_chain(4)}) {
    ChainSolver solver(chain);
    for (const char* text :
         {"none", "every", "segments=2", "segments=4", "sqrt", "log", "revolve=2", "revolve=4"}) {
      const Schedule fixed = schedule_of_policy(chain, parse_policy(text));
      const Schedule plan = solver.schedule(fixed.peak_bytes);
      EXPECT_LE(plan.time_ns, fixed.time_ns) << text;
      EXPECT_LE(plan.peak_bytes, fixed.peak_bytes) << text;
    }
  }
}

}  // namespace
}  // namespace headroom
