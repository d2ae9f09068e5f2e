#include <headroom/optim/schedule.h>

#include <headroom/core/error.h>

#include <cmath>

namespace headroom {
namespace {

TEST(LearningRateSchedule, ConstantRisesThenStays) {
  const LearningRateSchedule schedule(ScheduleKind::kConstant, 0, 4);
  const std::vector<double> expected = {0, 0.25, 0.5, 0.75, 1, 1, 1};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_DOUBLE_EQ(schedule.at(i), expected[i]) << i;
  EXPECT_DOUBLE_EQ(LearningRateSchedule(ScheduleKind::kConstant).at(0), 1);
  EXPECT_DOUBLE_EQ(schedule.at(1'000'000), 1);
}

TEST(LearningRateSchedule, LinearFallsToZeroAtTheEnd) {
  // transformers.get_linear_schedule_with_warmup(num_warmup_steps=2, num_training_steps=10)
  const LearningRateSchedule schedule(ScheduleKind::kLinear, 10, 2);
  const std::vector<double> expected = {0,     0.5,  1,     0.875, 0.75, 0.625, 0.5,
                                        0.375, 0.25, 0.125, 0,     0,    0};
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_DOUBLE_EQ(schedule.at(i), expected[i]) << i;
}

TEST(LearningRateSchedule, CosineFallsToZeroAndStaysThere) {
  const LearningRateSchedule schedule(ScheduleKind::kCosine, 10, 2);
  EXPECT_DOUBLE_EQ(schedule.at(0), 0);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(2), 1);
  EXPECT_NEAR(schedule.at(4), (1 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(schedule.at(6), 0.5, 1e-15);
  EXPECT_NEAR(schedule.at(10), 0, 1e-15);
  EXPECT_NEAR(schedule.at(14), 0, 1e-15);
  EXPECT_NEAR(schedule.at(18), 0, 1e-15);
}

TEST(LearningRateSchedule, WarmUpMayFillOrExceedTheTraining) {
  for (const ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    const LearningRateSchedule schedule(kind, 4, 8);
    for (int i = 0; i < 8; ++i) EXPECT_DOUBLE_EQ(schedule.at(i), i / 8.0);
    for (int i = 8; i < 20; ++i) EXPECT_TRUE(schedule.at(i) >= 0 && schedule.at(i) <= 1) << i;
  }
}

TEST(LearningRateSchedule, RejectsNonsense) {
  EXPECT_THROW(LearningRateSchedule(ScheduleKind::kLinear), ConfigError);
  EXPECT_THROW(LearningRateSchedule(ScheduleKind::kCosine, 0, 4), ConfigError);
  EXPECT_THROW(LearningRateSchedule(ScheduleKind::kLinear, 10, -1), ConfigError);
  EXPECT_THROW(LearningRateSchedule(ScheduleKind::kConstant, -1), ConfigError);
  EXPECT_THROW(LearningRateSchedule(ScheduleKind::kConstant).at(-1), ConfigError);
}

TEST(ScheduleKind, IsReadByName) {
  for (const char* name : {"constant", "linear", "cosine"})
    EXPECT_STREQ(schedule_kind_name(parse_schedule_kind(name)), name);
  EXPECT_THROW(parse_schedule_kind("polynomial"), ConfigError);
  EXPECT_THROW(parse_schedule_kind(""), ConfigError);
}

TEST(LrScheduler, SetsEveryGroupByItsOwnBase) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())});
  groups.emplace_back(std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())},
                      std::make_unique<torch::optim::SGDOptions>(0.01));
  torch::optim::SGD optimizer(std::move(groups), torch::optim::SGDOptions(0.1));
  const auto rate = [&](int group) { return optimizer.param_groups()[group].options().get_lr(); };

  LrScheduler scheduler(optimizer, LearningRateSchedule(ScheduleKind::kLinear, 4));
  EXPECT_DOUBLE_EQ(rate(0), 0.1);
  EXPECT_DOUBLE_EQ(rate(1), 0.01);
  scheduler.step();
  EXPECT_DOUBLE_EQ(rate(0), 0.075);
  EXPECT_DOUBLE_EQ(rate(1), 0.0075);
  EXPECT_DOUBLE_EQ(scheduler.learning_rate(), 0.075);
  scheduler.set_update(3);
  EXPECT_DOUBLE_EQ(rate(0), 0.025);
  EXPECT_EQ(scheduler.update(), 3);
  scheduler.step();
  scheduler.step();
  EXPECT_DOUBLE_EQ(rate(0), 0);
}

TEST(LrScheduler, ServesEveryOptimizerOfLibTorch) {
  const std::vector<at::Tensor> parameters = {torch::zeros({1}, torch::requires_grad())};
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  optimizers.push_back(std::make_unique<torch::optim::Adam>(parameters, 0.2));
  optimizers.push_back(std::make_unique<torch::optim::AdamW>(parameters, 0.2));
  optimizers.push_back(std::make_unique<torch::optim::RMSprop>(parameters, 0.2));
  optimizers.push_back(std::make_unique<torch::optim::Adagrad>(parameters, 0.2));
  for (auto& optimizer : optimizers) {
    LrScheduler scheduler(*optimizer, LearningRateSchedule(ScheduleKind::kLinear, 2));
    scheduler.step();
    EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].options().get_lr(), 0.1);
  }
}

TEST(ScaleLrByBatch, IsTheLinearScalingRule) {
  EXPECT_DOUBLE_EQ(scale_lr_by_batch(0.1, 8192, 256), 3.2);
  EXPECT_DOUBLE_EQ(scale_lr_by_batch(0.1, 64, 256), 0.025);
  EXPECT_THROW(scale_lr_by_batch(0.1, 64, 0), ConfigError);
  EXPECT_THROW(scale_lr_by_batch(0.1, 0, 64), ConfigError);
}

}  // namespace
}  // namespace headroom
