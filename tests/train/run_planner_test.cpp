#include "train/run_planner.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class RunPlannerTest : public ::testing::Test {
 protected:
  RunPlannerTest() { set_log_quiet(true); }
  ~RunPlannerTest() override { MemoryMeter::instance().set_cap(0); }

  TrainingArguments budgeted() const {
    TrainingArguments arguments = plain_arguments(folder_ / "out");
    arguments.per_device_train_batch_size = 4;
    arguments.memory_budget_bytes = 1 << 28;
    return arguments;
  }

  TemporaryFolder folder_;
  RankGroup ranks_{nullptr};
  std::shared_ptr<TableData> data_ = make_data(40);
  Chain chain_ = chain_of(make_plain_network(5));
};

TEST_F(RunPlannerTest, WithoutABudgetNothingIsMeasured) {
  const RunSettings settings(plain_arguments(folder_ / "out"), 1);
  RunPlanner planner(settings, chain_, *data_, ranks_);
  int num_loaded = 0;
  data_->on_load = [&](c10::ArrayRef<std::int64_t>) { ++num_loaded; };
  planner.start({});
  EXPECT_EQ(num_loaded, 0);
  EXPECT_FALSE(planner.plan().is_predicted);
  EXPECT_EQ(planner.plan().micro_batch(), 8);
  EXPECT_EQ(planner.num_plans(), 1);
}

TEST_F(RunPlannerTest, EachSizeOfWindowHasAPlanOfItsOwnBeforeTheFirstUpdate) {
  TrainingArguments arguments = budgeted();
  arguments.gradient_accumulation_steps = "0:1,1:4";
  const RunSettings settings(arguments, 1);
  RunPlanner planner(settings, chain_, *data_, ranks_);
  planner.start({});
  EXPECT_EQ(planner.num_plans(), 2);
  EXPECT_EQ(planner.plan().num_micro_batches(), 1);
  const std::int64_t of_one = planner.plan().predicted_peak_bytes();
  planner.begin_window({range(0, 16), 16, 11});
  EXPECT_EQ(planner.plan().num_micro_batches(), 4);
  EXPECT_EQ(planner.plan().micro_batch(), 4);
  EXPECT_EQ(planner.num_plans(), 2) << "nothing is planned while it trains";
  EXPECT_EQ(planner.predicted_peak_bytes(),
            std::max(of_one, planner.plan().predicted_peak_bytes()));
  planner.begin_window({range(0, 4), 4, 12});
  EXPECT_EQ(planner.plan().num_micro_batches(), 1);
}

TEST_F(RunPlannerTest, ALaterWindowThatDoesNotFitIsFoundAtTheStart) {
  // With several micro-batches the gradients are there during the forward as well, so that there
  // are budgets which hold one micro-batch and not four.
  const auto fits = [&](const std::string& steps, std::int64_t budget_bytes) {
    TrainingArguments arguments = budgeted();
    arguments.max_grad_norm = 1;
    arguments.gradient_accumulation_steps = steps;
    arguments.memory_budget_bytes = budget_bytes;
    const RunSettings settings(arguments, 1);
    RunPlanner planner(settings, chain_, *data_, ranks_);
    try {
      planner.start({});
      return true;
    } catch (const BudgetError&) {
      return false;
    }
  };
  std::int64_t budget_bytes = MemoryMeter::instance().live_bytes();
  while (!fits("1", budget_bytes)) budget_bytes += 64;
  EXPECT_FALSE(fits("0:1,1:4", budget_bytes));
  EXPECT_TRUE(fits("0:1,1:4", 2 * budget_bytes));
}

TEST_F(RunPlannerTest, APreviewLeavesNothingBehind) {
  const RunSettings settings(budgeted(), 1);
  RunPlanner planner(settings, chain_, *data_, ranks_);
  const RunPlan plan = planner.preview();
  EXPECT_EQ(plan.alternatives.size(), 2U);
  EXPECT_EQ(plan.optimizer_state_bytes.size(), optimizer_names().size());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

TEST_F(RunPlannerTest, ARunThatGoesOnKeepsItsSplit) {
  TrainingArguments arguments = budgeted();
  arguments.per_device_train_batch_size = 0;
  arguments.global_batch_size = 12;
  const RunSettings settings(arguments, 1);
  RunPlanner first(settings, chain_, *data_, ranks_);
  first.start({});
  TrainingPosition saved;
  first.describe_splits(saved);
  ASSERT_EQ(saved.micro_batch_by_shape.size(), 1U);
  saved.micro_batch_by_shape.begin()->second = 5;
  RunPlanner resumed(settings, chain_, *data_, ranks_);
  resumed.start(saved);
  EXPECT_EQ(resumed.plan().micro_batch(), 4) << "12 as 3 micro-batches of at most 5";
}

TEST_F(RunPlannerTest, AfterMemoryRanOutThePlanFitsTheCap) {
  const RunSettings settings(budgeted(), 1);
  RunPlanner planner(settings, chain_, *data_, ranks_);
  std::vector<PlanNews> heard;
  planner.on_plan([&](const PlanNews& news, const RunPlan&) { heard.push_back(news); });
  planner.start({});
  EXPECT_TRUE(heard.empty());
  const Window window{range(0, 4), 4, 7};
  planner.begin_window(window);
  ShareReport report;
  report.outcome = ShareOutcome::kOutOfMemory;
  report.reason = "a test";
  report.cap_bytes = 1 << 27;
  planner.replace(report, window);
  EXPECT_EQ(planner.plan().budget_bytes, 1 << 27);
  EXPECT_EQ(planner.num_recoveries(), 1);
  ASSERT_EQ(heard.size(), 1U);
  EXPECT_TRUE(heard[0].is_warning);
  EXPECT_NE(heard[0].message.find("update 7: memory ran out (a test)"), std::string::npos);
  report.cap_bytes = 0;
  EXPECT_THROW(planner.replace(report, window), BudgetError) << "nobody knows how much there is";
}

}  // namespace
}  // namespace headroom
