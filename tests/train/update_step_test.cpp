// One update by itself: its plan is a constant.
#include "train/update_step.h"

#include "core/log.h"

#include <gtest/gtest.h>

#include "train/stop.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class FixedPlans final : public WindowPlans {
 public:
  FixedPlans(const Chain& chain, std::int64_t micro_batch) {
    Schedule schedule;
    schedule.operations = keep_everything(chain.size());
    plan_.batch.micro_batches = {{micro_batch, 1, schedule}};
  }
  void begin_window(const Window&) override { ++num_windows; }
  const RunPlan& plan() const override { return plan_; }
  bool serves(const MicroBatch&, bool) override { return num_refused-- <= 0; }
  const Shapes& window_shapes() const override { return shapes_; }
  void replace(const ShareReport& agreed, const Window&) override {
    replaced.push_back(agreed.outcome);
  }

  int num_windows = 0;
  int num_refused = 0;  // micro-batches that another plan is wanted for
  std::vector<ShareOutcome> replaced;

 private:
  RunPlan plan_;
  Shapes shapes_;
};

class UpdateStepTest : public ::testing::Test {
 protected:
  UpdateStepTest() { set_log_quiet(true); }

  UpdateStep make_step(const TrainingArguments& arguments, StepHooks hooks = {}) {
    settings_ = std::make_unique<RunSettings>(arguments, 1);
    return UpdateStep(*settings_, chain_, *data_, plans_, ranks_, std::move(hooks));
  }
  std::vector<at::Tensor> copies() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : weights_of(chain_)) result.push_back(tensor.clone());
    return result;
  }
  void expect_unchanged(const std::vector<at::Tensor>& before) const {
    const std::vector<at::Tensor> after = weights_of(chain_);
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
    for (const at::Tensor& parameter : chain_.parameters())
      EXPECT_FALSE(parameter.grad().defined());
  }

  std::shared_ptr<TableData> data_ = make_data();
  torch::nn::Sequential network_ = make_noisy_network(5);
  Chain chain_ = chain_of(network_);
  FixedPlans plans_{chain_, 4};
  RankGroup ranks_{nullptr};
  std::unique_ptr<RunSettings> settings_;
  const Window window_{range(0, 8), 8, 1};
};

TEST_F(UpdateStepTest, IsOneUpdateOfTheWholeWindow) {
  network_ = make_plain_network(5);
  chain_ = chain_of(network_);
  plans_ = FixedPlans(chain_, 3);
  std::vector<std::size_t> operations;
  UpdateStep step =
      make_step(plain_arguments("unused"),
                {[&](std::size_t operation, bool) { operations.push_back(operation); }, {}});
  const Update update = step.run(window_);
  torch::nn::Sequential theirs = make_plain_network(5);
  double norm = 0;
  EXPECT_NEAR(update.loss, plain_update(theirs, *data_, range(0, 8), 0.1, &norm), 1e-6);
  EXPECT_NEAR(update.grad_norm, norm, 1e-5);
  EXPECT_EQ(update.num_samples, 8);
  EXPECT_EQ(update.learning_rate, 0.1);
  EXPECT_TRUE(update.applied);
  expect_close(network_, theirs, 1e-6);
  EXPECT_EQ(plans_.num_windows, 1);
  EXPECT_EQ(operations.size(), 3 * 2 * chain_.size()) << "3 micro-batches, forward and backward";
  EXPECT_GT(update.peak_bytes, update.live_bytes);
}

TEST_F(UpdateStepTest, IsMadeAgainFromItsStartWithAnotherPlan) {
  const std::vector<at::Tensor> before = copies();
  const RandomState random = RandomState::capture();
  make_step(plain_arguments("unused")).run(window_);
  const std::vector<at::Tensor> expected = copies();
  for (std::size_t i = 0; i < before.size(); ++i) weights_of(chain_)[i].data().copy_(before[i]);
  random.restore();
  plans_.num_refused = 1;
  make_step(plain_arguments("unused")).run(window_);
  EXPECT_EQ(plans_.replaced, std::vector<ShareOutcome>{ShareOutcome::kWantsOtherPlan});
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(weights_of(chain_)[i].equal(expected[i])) << i;
}

TEST_F(UpdateStepTest, AnErrorInTheMiddleLeavesEverythingAsItWas) {
  int num_loaded = 0;
  data_->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 2) throw DataError("the disk is on fire");
  };
  const std::vector<at::Tensor> before = copies();
  const RandomState random = RandomState::capture();
  const double next = torch::rand({1}).item<double>();
  random.restore();
  UpdateStep step = make_step(plain_arguments("unused"));
  EXPECT_THROW(step.run(window_), DataError);
  EXPECT_TRUE(step.is_intact());
  expect_unchanged(before);
  EXPECT_EQ(torch::rand({1}).item<double>(), next);
}

TEST_F(UpdateStepTest, AStopIsSeenBetweenOperationsAndLeavesEverythingAsItWas) {
  const StopScope stop_scope;
  const std::vector<at::Tensor> before = copies();
  std::size_t num_operations = 0;
  UpdateStep step = make_step(plain_arguments("unused"), {[&](std::size_t, bool) {
                                                            if (++num_operations == 3)
                                                              request_stop();
                                                          },
                                                          {}});
  EXPECT_THROW(step.run(window_), Stopped);
  EXPECT_EQ(num_operations, 3U) << "at once";
  expect_unchanged(before);
}

TEST_F(UpdateStepTest, MemoryThatRunsOutAsksForAnotherPlan) {
  int num_loaded = 0;
  data_->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 2) throw OutOfBudget(1, 1, 1, "full");
  };
  make_step(plain_arguments("unused")).run(window_);
  EXPECT_EQ(plans_.replaced, std::vector<ShareOutcome>{ShareOutcome::kOutOfMemory});
}

TEST_F(UpdateStepTest, WhatIsNotFiniteIsSkippedOrOnRequestAnError) {
  data_->rows[2][2] = std::nan("");
  const std::vector<at::Tensor> parameters_before = [&] {
    std::vector<at::Tensor> result;
    for (const at::Tensor& parameter : chain_.parameters()) result.push_back(parameter.clone());
    return result;
  }();
  TrainingArguments arguments = plain_arguments("unused");
  EXPECT_FALSE(make_step(arguments).run(window_).applied);
  for (std::size_t i = 0; i < parameters_before.size(); ++i)
    EXPECT_TRUE(chain_.parameters()[i].equal(parameters_before[i]));
  network_ = make_noisy_network(5);
  chain_ = chain_of(network_);
  const std::vector<at::Tensor> before = copies();
  arguments.error_on_nan = true;
  EXPECT_THROW(make_step(arguments).run(window_), Error);
  expect_unchanged(before);  // the statistics of BatchNorm, too
}

}  // namespace
}  // namespace headroom
