#include "train/run_settings.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

TEST(RunSettings, TheGlobalBatchIsMicroBatchTimesStepsTimesRanksUnlessItIsGiven) {
  TrainingArguments arguments;
  arguments.per_device_train_batch_size = 4;
  arguments.gradient_accumulation_steps = "0:1,2:8";
  const RunSettings settings(arguments, 3);
  EXPECT_EQ(settings.window_samples(), 12);
  EXPECT_EQ(settings.window_samples(1), 12);
  EXPECT_EQ(settings.window_samples(2), 96);
  const auto data = make_data(100);
  EXPECT_EQ(settings.grouping(*data).window_samples(2), 96);
  arguments.gradient_accumulation_steps = "1";
  arguments.global_batch_size = 64;
  EXPECT_EQ(RunSettings(arguments, 3).window_samples(), 64);
  EXPECT_EQ(RunSettings(arguments, 3).grouping(*data).window_samples(0), 64);
}

TEST(RunSettings, TheLearningRateFollowsTheBatchWhereAsked) {
  TrainingArguments arguments;
  arguments.learning_rate = 0.1;
  EXPECT_EQ(RunSettings(arguments, 1).optimizer.learning_rate, 0.1);
  EXPECT_EQ(RunSettings(arguments, 1).learning_rate_note(), "");
  arguments.scale_lr_by_batch = 4;  // the micro-batch is 8
  EXPECT_DOUBLE_EQ(RunSettings(arguments, 2).optimizer.learning_rate, 0.4);
  EXPECT_NE(RunSettings(arguments, 2).learning_rate_note().find("0.4"), std::string::npos);
}

TEST(RunSettings, UpdatesInBackwardAreOutWhereAllGradientsAreNeededAtOnce) {
  TrainingArguments arguments;
  arguments.max_grad_norm = 0;
  EXPECT_TRUE(RunSettings(arguments, 1).may_update_in_backward);
  EXPECT_FALSE(RunSettings(arguments, 2).may_update_in_backward) << "they are summed over ranks";
  arguments.fp16 = true;
  EXPECT_FALSE(RunSettings(arguments, 1).may_update_in_backward) << "an overflow skips all";
  arguments.fp16 = false;
  arguments.max_grad_norm = 1;
  EXPECT_FALSE(RunSettings(arguments, 1).may_update_in_backward) << "clipping";
}

TEST(RunSettings, AResumedRunMustAgreeInWhatMakesItsNumbers) {
  TrainingArguments arguments;
  const auto before = RunSettings(arguments, 1).resume_settings();
  arguments.output_dir = "elsewhere";
  arguments.memory_budget_bytes = 1 << 30;
  EXPECT_EQ(RunSettings(arguments, 1).resume_settings(), before) << "a plan changes no number";
  arguments.optim = "sgd";
  EXPECT_NE(RunSettings(arguments, 1).resume_settings(), before);
  EXPECT_NE(RunSettings(TrainingArguments(), 2).resume_settings(), before) << "another batch";
}

TEST(RunSettings, RefusesArgumentsThatMakeNoSense) {
  TrainingArguments arguments;
  arguments.optim = "sdg";
  EXPECT_THROW(RunSettings(arguments, 1), ConfigError);
}

}  // namespace
}  // namespace headroom
