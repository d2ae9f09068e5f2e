// The peak that a paged plan states is that of its own walk: of a first micro-batch within which
// gradients appear, and of later ones that find them.
#include "plan/paged_search.h"
#include "plan/page_walk.h"
#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {
namespace {

constexpr int kStages = 5;
constexpr std::int64_t kUnitBytes = 1000, kInputBytes = 10, kResidentBytes = 300;

ChainCosts chain_with(std::int64_t backward_transient_bytes) {
  ChainCosts chain;
  for (int stage = 0; stage < kStages; ++stage) {
    const std::int64_t gradient = stage + 1 < kStages ? 50 : 0;
    StageCosts costs{"s" + std::to_string(stage), 50, gradient, 100, 20, 0, {}, {}, 0};
    costs.options = {{400, 100, 200, 20, backward_transient_bytes}};
    chain.stages.push_back(std::move(costs));
  }
  return chain;
}

PagedRequest request_of(std::int64_t num_samples, std::int64_t first_transient_bytes,
                        std::int64_t later_transient_bytes) {
  PagedRequest request;
  request.num_samples = num_samples;
  request.micro_batch_size = 1;
  for (int stage = 0; stage < kStages; ++stage)
    request.units.push_back(
        {"s" + std::to_string(stage), {stage}, {kUnitBytes, kUnitBytes, 2 * kUnitBytes}});
  request.resident_bytes = kResidentBytes;
  request.may_update_in_backward = true;
  request.disk = {0.05, 0.05};
  request.costs = [=](std::int64_t) -> std::optional<PagedCosts> {
    return PagedCosts{chain_with(first_transient_bytes), chain_with(later_transient_bytes),
                      kInputBytes};
  };
  return request;
}

// What the plan's walk comes to where micro-batches cost this much.
std::int64_t peak_of(const PagedPlan& plan, const PagedCosts& costs) {
  std::vector<PageStep> all;
  for (std::int64_t micro = 0; micro < plan.batch.accumulation_steps; ++micro) {
    const Schedule schedule = schedule_from_operations(micro == 0 ? costs.first : costs.later,
                                                       plan.batch.largest().schedule.operations);
    for (PageStep& step : micro_batch_steps(plan.paging.units, schedule, micro > 0)) {
      step.peak_bytes += kInputBytes;
      step.after_bytes += kInputBytes;
      all.push_back(std::move(step));
    }
  }
  const std::vector<PageStep> steps = window_steps(plan.paging, std::move(all), 0);
  return kResidentBytes + replay(plan.paging, steps, {}).peak_bytes;
}

// The budget may hold a stage whose gradients appear, but not one that adds to those that are
// there.
TEST(PagedSearch, AStageThatWasNotMeasuredGivesNoPlan) {
  for (const std::int64_t num_steps : {1, 2}) {
    PagedRequest request = request_of(num_steps, 0, 700);
    request.budget_bytes = std::int64_t{1} << 40;
    ASSERT_TRUE(make_paged_plan(request));
    const auto all = request.costs;
    request.costs = [&](std::int64_t size) {
      std::optional<PagedCosts> costs = all(size);
      costs->later.stages.back().options = {StageOption{}};
      costs->later.stages.back().options[0].fits = false;
      return costs;
    };
    EXPECT_EQ(make_paged_plan(request).has_value(), num_steps == 1);
    EXPECT_EQ(paged_floor(request).has_value(), num_steps == 1);
  }
}

TEST(PagedSearch, ThePeakIsThatOfGradientsThatAppearAndThenAreAddedTo) {
  PagedRequest request = request_of(2, /*first=*/0, /*later=*/700);
  const std::int64_t floor = paged_floor(request).value();
  const ChainCosts later = chain_with(700);
  int num_lower = 0;
  for (std::int64_t budget = floor; budget < 6 * floor; budget += floor / 20) {
    request.budget_bytes = budget;
    const std::optional<PagedPlan> plan = make_paged_plan(request);
    ASSERT_TRUE(plan) << budget;
    EXPECT_LE(plan->batch.peak_bytes, budget);
    EXPECT_EQ(plan->batch.peak_bytes, peak_of(*plan, *request.costs(1))) << budget;
    if (plan->batch.peak_bytes < peak_of(*plan, {later, later, kInputBytes})) ++num_lower;
  }
  EXPECT_GT(num_lower, 0) << "nowhere did the first micro-batch decide";
}

// At the floor nothing is in memory but the stage that runs backward: its weights and gradients,
// what it kept, the gradients of its output and input, and what else it needs.
TEST(PagedSearch, TheFloorHoldsTheMicroBatchThatNeedsMost) {
  const auto floor_at = [](std::int64_t num_samples, std::int64_t first, std::int64_t later) {
    return paged_floor(request_of(num_samples, first, later)).value();
  };
  const std::int64_t plain = floor_at(2, 2000, 2000);
  EXPECT_EQ(floor_at(2, 2000, 0), plain) << "the first one counts";
  EXPECT_EQ(floor_at(2, 0, 2000), plain) << "so does the second";
  EXPECT_EQ(floor_at(2, 2500, 2000), plain + 500);
  EXPECT_EQ(floor_at(1, 2000, 5000), plain) << "a single one has no second";
}

}  // namespace
}  // namespace headroom
