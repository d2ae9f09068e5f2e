// Pages come before a step needs them, go when none does, and what is predicted is what the moves
// add up to.
#include "plan/page_walk.h"
#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <set>

namespace headroom {
namespace {

constexpr std::int64_t kWeights = 100, kGradients = 100, kState = 200, kScalars = 64;

// Stages of one unit each; the first and the last share one more.
std::vector<PageUnit> units_of(int num_stages) {
  std::vector<PageUnit> units;
  for (int stage = 0; stage < num_stages; ++stage)
    units.push_back({"s" + std::to_string(stage), {stage}, {kWeights, kGradients, kState}});
  units.push_back({"tied", {0, num_stages - 1}, {10, 10, 20}});
  return units;
}

Schedule keep_all(int num_stages) {
  Schedule schedule;
  for (int stage = 0; stage < num_stages; ++stage)
    schedule.operations.push_back({OperationKind::kForwardKeep, stage, 0, 0});
  for (int stage = num_stages; stage-- > 0;)
    schedule.operations.push_back({OperationKind::kBackward, stage, 0, 0});
  schedule.curve.assign(schedule.operations.size(), {7, 0});
  return schedule;
}

PagingPlan plan_of(const std::vector<PageUnit>& units, bool paged, bool reads_ahead,
                   UpdateTime updates = UpdateTime::kAfterBackward) {
  PagingPlan plan;
  plan.units = units;
  plan.is_paged.assign(units.size(), {paged, paged, paged});
  plan.reads_ahead = reads_ahead;
  plan.updates = updates;
  return plan;
}

std::vector<PageStep> update_of(const PagingPlan& plan, int num_stages, int num_micro) {
  std::vector<PageStep> steps;
  for (int micro = 0; micro < num_micro; ++micro) {
    for (PageStep& step : micro_batch_steps(plan.units, keep_all(num_stages), micro > 0)) {
      step.ns = 1000;
      steps.push_back(step);
    }
  }
  return window_steps(plan, std::move(steps), 0);
}

PageReplay replay_of(const PagingPlan& plan, int num_stages, int num_micro, const DiskSpeed& disk) {
  return replay(plan, update_of(plan, num_stages, num_micro), disk);
}

// Follows the moves as a pager would, and checks that each of them is possible.
TEST(PageWalk, EveryStepFindsItsPagesAndNothingIsLost) {
  constexpr int kStages = 5;
  const std::vector<PageUnit> units = units_of(kStages);
  for (const auto& [reads_ahead, updates] :
       {std::pair{false, UpdateTime::kAfterBackward}, std::pair{true, UpdateTime::kAfterBackward},
        std::pair{false, UpdateTime::kInBackward}, std::pair{true, UpdateTime::kInBackward},
        std::pair{false, UpdateTime::kInNextForward},
        std::pair{true, UpdateTime::kInNextForward}}) {
    const PagingPlan plan = plan_of(units, true, reads_ahead, updates);
    const std::vector<PageStep> steps = update_of(plan, kStages, 3);
    PageWalk walk(plan, steps);
    std::set<std::size_t> memory, on_disk, reading, writing, changed;
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      on_disk.insert(Page{unit, PageKind::kWeights}.index());
      on_disk.insert(Page{unit, PageKind::kState}.index());
      if (updates == UpdateTime::kInNextForward)
        on_disk.insert(Page{unit, PageKind::kGradients}.index());
    }
    for (std::size_t step = 0; step <= walk.steps().size(); ++step) {
      const PageMoves moves = walk.before(step);
      for (const std::size_t page : moves.finished) {
        EXPECT_EQ(writing.erase(page), 1u);
        on_disk.insert(page);
        changed.erase(page);
      }
      for (const std::size_t page : moves.written) {
        EXPECT_TRUE(memory.count(page));
        writing.insert(page);
      }
      for (const std::size_t page : moves.settled) {
        EXPECT_EQ(writing.erase(page), 1u);
        on_disk.insert(page);
        changed.erase(page);
      }
      for (const std::size_t page : moves.freed) {
        EXPECT_FALSE(writing.count(page));
        EXPECT_TRUE(!changed.count(page) || Page::at(page).kind == PageKind::kGradients);
        EXPECT_EQ(memory.erase(page), 1u);
        changed.erase(page);
      }
      for (const auto* started : {&moves.read, &moves.ahead}) {
        for (const std::size_t page : *started) {
          EXPECT_TRUE(on_disk.count(page)) << page;
          EXPECT_FALSE(memory.count(page) || reading.count(page)) << page;
          reading.insert(page);
        }
      }
      for (const std::size_t page : moves.awaited) {
        EXPECT_EQ(reading.erase(page), 1u);
        memory.insert(page);
      }
      if (step == walk.steps().size()) break;
      std::int64_t bytes = 0;
      for (const PageUse& use : walk.steps()[step].uses) {
        if (use.is_born) memory.insert(use.page.index());
        EXPECT_TRUE(memory.count(use.page.index())) << "step " << step;
        if (use.is_written) changed.insert(use.page.index());
      }
      for (const auto* held : {&memory, &reading}) {
        for (const std::size_t page : *held)
          bytes += units[Page::at(page).unit].bytes_of(Page::at(page).kind);
      }
      EXPECT_EQ(bytes, walk.resident_bytes()) << "step " << step;
    }
    EXPECT_TRUE(memory.empty() && reading.empty() && writing.empty() && changed.empty());
  }
}

TEST(PageWalk, NothingMovesWhereEverythingIsResident) {
  const std::vector<PageUnit> units = units_of(4);
  const PageReplay all = replay_of(plan_of(units, false, true), 4, 2, {1.0, 1.0});
  EXPECT_EQ(all.bytes_read + all.bytes_written + all.wait_ns, 0);
  EXPECT_EQ(all.time_ns, 2 * 8 * 1000);
  // Weights and state always, all gradients at the end of backward.
  EXPECT_EQ(all.forward_peak_bytes, 4 * (kWeights + kGradients + kState) + 40 + 7);
  EXPECT_EQ(all.update_peak_bytes, 4 * (kWeights + kGradients + kState) + 40 + kScalars);
}

TEST(PageWalk, ReadingAheadTradesMemoryForTime) {
  const std::vector<PageUnit> units = units_of(6);
  const DiskSpeed disk{5.0, 5.0};
  const PageReplay lean = replay_of(plan_of(units, true, false), 6, 2, disk);
  const PageReplay fast = replay_of(plan_of(units, true, true), 6, 2, disk);
  EXPECT_LT(lean.peak_bytes, fast.peak_bytes);
  EXPECT_LT(fast.time_ns, lean.time_ns);
  EXPECT_LE(fast.disk_ns, lean.disk_ns);
  EXPECT_EQ(lean.time_ns, 2 * 12 * 1000 + lean.wait_ns);
  EXPECT_EQ(lean.wait_ns, lean.disk_ns) << "without overlap every transfer is waited for";
  // At an update the least is one unit; nothing else is there.
  EXPECT_EQ(lean.update_peak_bytes, kWeights + kGradients + kState + kScalars);
}

TEST(PageWalk, WhatMovesBesideComputingTakesTimeFromIt) {
  const std::vector<PageUnit> units = units_of(6);
  const PagingPlan lean = plan_of(units, true, false), ahead = plan_of(units, true, true);
  const PageReplay free = replay_of(ahead, 6, 2, {0.0, 0.0});
  const PageReplay taken = replay_of(ahead, 6, 2, {0.0, 0.0, 3.0});
  EXPECT_EQ(free.wait_ns, 0);
  EXPECT_EQ(taken.time_ns, free.time_ns + taken.wait_ns);
  EXPECT_GT(taken.wait_ns, 0);
  EXPECT_LE(taken.wait_ns, 3 * (taken.bytes_read + taken.bytes_written));
  // Nothing computes while everything is waited for.
  EXPECT_EQ(replay_of(lean, 6, 2, {5.0, 5.0, 3.0}).time_ns,
            replay_of(lean, 6, 2, {5.0, 5.0}).time_ns);
}

TEST(PageWalk, UpdatesBesideComputingHideTheDisk) {
  const std::vector<PageUnit> units = units_of(6);
  const DiskSpeed disk{1.0, 1.0};
  const PageReplay after = replay_of(plan_of(units, true, true), 6, 2, disk);
  const PageReplay inside =
      replay_of(plan_of(units, true, true, UpdateTime::kInBackward), 6, 2, disk);
  const PageReplay later =
      replay_of(plan_of(units, true, true, UpdateTime::kInNextForward), 6, 2, disk);
  EXPECT_LT(later.wait_ns, after.wait_ns / 2);
  EXPECT_LT(inside.wait_ns, after.wait_ns / 2);
  EXPECT_LT(inside.time_ns, after.time_ns);
  EXPECT_LT(later.time_ns, after.time_ns);
  // The last micro-batch's gradients are used where they are.
  EXPECT_LT(inside.bytes_written, later.bytes_written);
}

TEST(PageWalk, StateInPiecesNeedsItsBuffersAlone) {
  std::vector<PageUnit> units = units_of(4);
  for (PageUnit& unit : units) unit.stream_bytes = 5;
  PagingPlan plan = plan_of(units, true, false);
  plan.streams_state.assign(units.size(), true);
  const PageReplay pieces = replay_of(plan, 4, 1, {1.0, 1.0});
  const PageReplay whole = replay_of(plan_of(units, true, false), 4, 1, {1.0, 1.0});
  EXPECT_EQ(pieces.update_peak_bytes, kWeights + kGradients + 5 + kScalars);
  EXPECT_EQ(pieces.bytes_read, whole.bytes_read);
  EXPECT_EQ(pieces.bytes_written, whole.bytes_written);
}

TEST(PageWalk, FrozenWeightsAreReadAndNeverWritten) {
  std::vector<PageUnit> units = units_of(4);
  for (PageUnit& unit : units) unit.bytes = {kWeights, 0, 0};
  const PageReplay frozen = replay_of(plan_of(units, true, true), 4, 2, {1.0, 1.0});
  EXPECT_GT(frozen.bytes_read, 0);
  EXPECT_EQ(frozen.bytes_written, 0);
}

TEST(PageWalk, ATiedUnitsGradientIsBornOnceAndReadInTheEarlierStage) {
  const std::vector<PageUnit> units = units_of(5);
  const std::vector<PageStep> steps = micro_batch_steps(units, keep_all(5), false);
  const std::size_t tied = Page{5, PageKind::kGradients}.index();
  int births = 0, uses = 0;
  for (const PageStep& step : steps) {
    for (const PageUse& use : step.uses) {
      if (use.page.index() != tied) continue;
      ++uses;
      births += use.is_born ? 1 : 0;
    }
  }
  EXPECT_EQ(uses, 2);
  EXPECT_EQ(births, 1);
}

}  // namespace
}  // namespace headroom
