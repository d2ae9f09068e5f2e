#include "train/agreement.h"

#include <gtest/gtest.h>

#include "comm/rank_threads.h"

#include <cmath>

namespace headroom {
namespace {

using namespace headroom::testing;

// What every rank hears when they report these.
std::vector<ShareReport> heard_by_all(const std::vector<ShareReport>& reports) {
  std::vector<ShareReport> heard(reports.size());
  const auto errors = run_ranks(static_cast<std::int64_t>(reports.size()), [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    heard[rank] = agree(comm, reports[rank]);
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return heard;
}

TEST(Agreement, IsTheSameOnEveryRankBitForBit) {
  std::vector<ShareReport> reports(3);
  reports[0].loss_sum = 0.1;
  reports[1].loss_sum = 1e17 / 3;
  reports[2].loss_sum = -1e17 / 3;
  reports[0].cap_bytes = 700;
  reports[2].cap_bytes = 600;
  for (const ShareReport& heard : heard_by_all(reports)) {
    EXPECT_EQ(heard.outcome, ShareOutcome::kDone);
    EXPECT_EQ(heard.loss_sum, 0.1 + 1e17 / 3 - 1e17 / 3);
    EXPECT_EQ(heard.cap_bytes, 600) << "a rank without a cap has no say";
    EXPECT_EQ(heard.has_gradient, "");
  }
}

TEST(Agreement, TheWorstOutcomeWinsWithItsReasonAndTheLargestShapes) {
  std::vector<ShareReport> reports(3);
  reports[0].shapes = {{5, 8}, {}};
  reports[1].outcome = ShareOutcome::kOutOfMemory;
  reports[1].reason = "no layer\nfor 8 bytes";
  reports[2].outcome = ShareOutcome::kWantsOtherPlan;
  reports[2].shapes = {{9, 2}, {}};
  reports[2].samples = {7, 11};
  for (const ShareReport& heard : heard_by_all(reports)) {
    EXPECT_EQ(heard.outcome, ShareOutcome::kOutOfMemory);
    EXPECT_EQ(heard.reason, "on rank 1: no layer\nfor 8 bytes");
    EXPECT_EQ(heard.shapes, (Shapes{{9, 8}, {}}));
    EXPECT_EQ(heard.samples, (std::vector<std::int64_t>{7, 11}));
  }
}

TEST(Agreement, AStopOutweighsMemoryAndAFailureOutweighsAStop) {
  std::vector<ShareReport> reports(3);
  reports[0].outcome = ShareOutcome::kOutOfMemory;
  reports[2].outcome = ShareOutcome::kStopped;
  EXPECT_EQ(heard_by_all(reports)[1].outcome, ShareOutcome::kStopped);
  reports[1].outcome = ShareOutcome::kFailed;
  EXPECT_EQ(heard_by_all(reports)[0].outcome, ShareOutcome::kFailed);
}

TEST(Agreement, AGradientThatAnyRankHasIsSummedAndOneThatNobodyHasIsNot) {
  std::vector<ShareReport> reports(2);
  reports[0].has_gradient = "1010";
  reports[1].has_gradient = "0010";
  EXPECT_EQ(heard_by_all(reports)[1].has_gradient, "1010");
  reports[1].has_gradient.clear();  // all of them
  EXPECT_EQ(heard_by_all(reports)[0].has_gradient, "");
  reports = {ShareReport{}};
  reports[0].has_gradient = "01";
  EXPECT_EQ(heard_by_all(reports)[0].has_gradient, "01");
}

TEST(Agreement, ALossThatIsNotANumberStaysOne) {
  std::vector<ShareReport> reports(2);
  reports[1].loss_sum = std::nan("");
  for (const ShareReport& heard : heard_by_all(reports)) EXPECT_TRUE(std::isnan(heard.loss_sum));
}

TEST(Agreement, APlanArrivesAsItWasMade) {
  RunPlan plan;
  plan.global_batch = 33;
  plan.num_ranks = 2;
  plan.is_predicted = true;
  plan.budget_bytes = 1000;
  plan.predicted_step_seconds = 0.1;
  plan.time_ratio = 1.1;
  plan.batch.gradients = GradientMode::kUnallocated;
  plan.batch.accumulation_steps = 2;
  plan.batch.peak_bytes = 999;
  Schedule large, small;
  large.operations = {{OperationKind::kForwardStore, 1, 0, 1},
                      {OperationKind::kForwardKeep, 2, 3, 0}};
  small.operations = {{OperationKind::kFree, 7, 0, 0}};
  plan.batch.micro_batches = {{9, 1, large}, {8, 1, small}};
  const RunPlan arrived = unpack_plan(pack_plan(plan));
  EXPECT_EQ(arrived.batch.operations_for(9), large.operations);
  EXPECT_EQ(arrived.batch.operations_for(8), small.operations);
  EXPECT_EQ(arrived.batch.operations_for(1), small.operations);
  EXPECT_THROW(arrived.batch.operations_for(10), std::logic_error);
  EXPECT_EQ(arrived.global_batch, 33);
  EXPECT_EQ(arrived.num_ranks, 2);
  EXPECT_EQ(arrived.micro_batch(), 9);
  EXPECT_EQ(arrived.num_micro_batches(), 2);
  EXPECT_TRUE(arrived.is_predicted);
  EXPECT_FALSE(arrived.updates_in_backward());
  EXPECT_EQ(arrived.batch.gradients, GradientMode::kUnallocated);
  EXPECT_EQ(arrived.budget_bytes, 1000);
  EXPECT_EQ(arrived.predicted_peak_bytes(), 999);
  EXPECT_EQ(arrived.predicted_step_seconds, 0.1);
  EXPECT_EQ(arrived.time_ratio, 1.1);
}

}  // namespace
}  // namespace headroom
