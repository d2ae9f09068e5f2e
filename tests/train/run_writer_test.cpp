#include "train/run_writer.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class RunWriterTest : public ::testing::Test {
 protected:
  RunWriterTest() { set_log_quiet(true); }

  // One update and an evaluation, as a run would report them.
  void write_a_run(RunWriter& writer) const {
    RunPlan plan;
    plan.batch.micro_batches = {{3, 1, {}}};
    writer.describe(plan);
    writer.start(4, 5);
    writer.start_update(plan);
    Update update;
    update.loss = 2.5;
    update.num_samples = 6;
    TrainingPosition position;
    position.global_step = 5;
    writer.add(update, position, 0.5, plan);
    EvalResults eval;
    eval.loss = 1.5;
    eval.accuracy = 0.25;
    eval.num_samples = 7;
    writer.add(eval, 5, 0.5);
    writer.add(PlanNews{"", false, "24_24"}, plan);
    writer.finish();
    TrainResults results;
    results.global_step = 5;
    writer.write(results);
  }

  TemporaryFolder folder_;
};

TEST_F(RunWriterTest, LeavesThePromisedFiles) {
  const TrainingArguments arguments = plain_arguments(folder_ / "deep/out");
  RunWriter writer(arguments, false);
  write_a_run(writer);
  const auto lines = metrics_of(arguments.output_dir);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].at("step"), 5);
  EXPECT_EQ(lines[0].at("loss"), 2.5);
  EXPECT_EQ(lines[1].at("eval_accuracy"), 0.25);
  const auto read = [&](const std::string& name) {
    return nlohmann::json::parse(read_file(arguments.output_dir + "/" + name));
  };
  EXPECT_EQ(read("train_results.json").at("global_step"), 5);
  EXPECT_EQ(read("plan.json").at("micro_batch_size"), 3);
  EXPECT_EQ(read("plan-24_24.json").at("micro_batch_size"), 3);
  EXPECT_EQ(read("training_args.json").at("optim"), "sgd");
  EXPECT_EQ(writer.log().num_samples(), 6);
}

TEST_F(RunWriterTest, IsSilentOnOtherRanks) {
  const TrainingArguments arguments = plain_arguments(folder_ / "out");
  RunWriter writer(arguments, true);
  write_a_run(writer);
  EXPECT_FALSE(std::filesystem::exists(arguments.output_dir));
  EXPECT_EQ(writer.log().num_samples(), 6) << "but it counts";
}

TEST_F(RunWriterTest, AFolderThatCannotBeMadeIsFoundAtOnce) {
  std::ofstream(folder_ / "file") << "in the way";
  const TrainingArguments arguments = plain_arguments(folder_ / "file/out");
  EXPECT_THROW(RunWriter(arguments, false), ConfigError);
}

}  // namespace
}  // namespace headroom
