// What ends a run early loses nothing: stops, errors, evaluations that fail.
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/pretrained.h>
#include <headroom/train/trainer.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/budget_runs.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class Interruption : public ::testing::Test {
 protected:
  Interruption() { set_log_quiet(true); }
  ~Interruption() override { MemoryMeter::instance().set_cap(0); }

  TrainingArguments arguments(const std::string& name) const {
    TrainingArguments arguments = plain_arguments(folder_ / name);
    arguments.optim = "adamw";
    arguments.learning_rate = 1e-2;
    arguments.per_device_train_batch_size = 4;
    arguments.gradient_accumulation_steps = "2";
    return arguments;
  }
  static TrainResults train(const TrainingArguments& arguments,
                            const std::shared_ptr<TableData>& data = make_data()) {
    return Trainer(arguments, chain_of(make_noisy_network(5)), data).train();
  }

  TemporaryFolder folder_;
};

TEST_F(Interruption, AStopBeforeTheRunIsNotLost) {
  const TrainResults whole = train(arguments("whole"));
  TrainingArguments args = arguments("cut");
  Trainer trainer(args, chain_of(make_noisy_network(5)), make_data());
  Trainer::request_stop();
  EXPECT_EQ(trainer.train().global_step, 0);
  EXPECT_TRUE(trainer.was_interrupted());
  args.resume_from_checkpoint = "last";
  EXPECT_EQ(train(args).weights_sha256, whole.weights_sha256) << "and it is forgotten by then";
}

TEST_F(Interruption, AStopWhileItPlansEndsAtOnceAndLeavesASnapshot) {
  TrainingArguments args = arguments("planning");
  args.memory_budget_bytes = 1 << 28;
  const auto data = make_data();
  int num_loaded = 0;
  data->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 2) Trainer::request_stop();  // the first micro-batch that is measured
  };
  Trainer trainer(args, chain_of(make_noisy_network(5)), data);
  EXPECT_EQ(trainer.train().global_step, 0);
  EXPECT_TRUE(trainer.was_interrupted());
  EXPECT_EQ(num_loaded, 2) << "nothing was measured after it";
  MemoryMeter::instance().set_cap(0);
  TrainingArguments resumed = arguments("planning");
  resumed.resume_from_checkpoint = "last";
  EXPECT_EQ(train(resumed).weights_sha256, train(arguments("whole")).weights_sha256);
}

TEST_F(Interruption, AStopInAnEvaluationSavesWhatWasTrained) {
  TrainingArguments args = arguments("eval");
  args.eval_strategy = "steps";
  args.eval_steps = 2;
  const auto eval_data = make_data(9);
  int num_loaded = 0;
  eval_data->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 3) Trainer::request_stop();  // one sample was tried before training
  };
  Trainer trainer(args, chain_of(make_noisy_network(5)), make_data(), eval_data);
  EXPECT_EQ(trainer.train().global_step, 2);
  EXPECT_TRUE(trainer.was_interrupted());
  EXPECT_EQ(num_loaded, 3) << "nothing was evaluated after it";
  EXPECT_TRUE(std::filesystem::exists(folder_ / "eval/snapshot-2"));
}

TEST_F(Interruption, AnErrorLateInARunLeavesTheLastGoodState) {
  const TrainResults whole = train(arguments("whole"));
  TrainingArguments args = arguments("broken");
  const auto data = make_data();
  int num_loaded = 0;
  data->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 8) throw DataError("token 70000 is not in the vocabulary");
  };
  try {
    train(args, data);
    FAIL() << "trained on bad data";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("snapshot-3"), std::string::npos) << error.what();
  }
  args.resume_from_checkpoint = "last";
  EXPECT_EQ(train(args).weights_sha256, whole.weights_sha256);
}

TEST_F(Interruption, EvaluationDataThatDoesNotFitIsFoundBeforeTraining) {
  const auto data = make_data();
  int num_loaded = 0;
  data->on_load = [&](c10::ArrayRef<std::int64_t>) { ++num_loaded; };
  Trainer trainer(arguments("unfit"), chain_of(make_noisy_network(5)), data,
                  std::make_shared<TableData>(5, kWidth + 1, kClasses, 1));
  EXPECT_THROW(trainer.train(), DataError);
  EXPECT_EQ(num_loaded, 0);
}

TEST_F(Interruption, AFinalEvaluationThatFailsLosesNothing) {
  const TrainingArguments args = arguments("failed");
  const auto eval_data = make_data(9);
  eval_data->on_load = [](c10::ArrayRef<std::int64_t> indices) {
    if (indices.back() > 4) throw DataError("the file has shrunk");
  };
  Trainer trainer(args, chain_of(make_noisy_network(5)), make_data(), eval_data);
  EXPECT_THROW(trainer.train(), DataError);
  const auto results = nlohmann::json::parse(read_file(folder_ / "failed/train_results.json"));
  EXPECT_EQ(results.at("global_step"), 6);
  EXPECT_EQ(results.at("weights_sha256"), train(arguments("whole")).weights_sha256);
  EXPECT_FALSE(results.contains("eval_loss"));
  const Chain saved = chain_of(make_noisy_network(6));
  load_weights(saved, folder_ / "failed");
  EXPECT_EQ(results.at("weights_sha256"), weights_sha256(saved)) << "nor the model";
}

// Windows of 1 and of 4 micro-batches: in the one gradients appear in backward, in the other they
// are there before.
TEST(Schedules, EachSizeOfWindowIsPlannedAndThePredictionIsRight) {
  set_log_quiet(true);
  RunCase run{"mlp", "hidden=64,layers=6", 0, 8, "adamw"};
  const ScratchFolder folder("schedule");
  std::vector<std::int64_t> peaks;
  for (const char* steps : {"0:1,1:4", "0:4,1:1"}) {
    TrainingArguments arguments = arguments_of(run, std::int64_t{1} << 40, folder.path());
    arguments.gradient_accumulation_steps = steps;
    arguments.max_steps = -1;
    arguments.num_train_epochs = 2;
    const TrainResults results = PreparedRun(run, arguments).trainer->train();
    EXPECT_GE(results.predicted_peak_bytes, results.peak_memory_bytes) << steps;
    EXPECT_LE(results.predicted_peak_bytes, results.peak_memory_bytes * 1.02) << steps;
    EXPECT_EQ(results.num_plans, 2) << steps;
    EXPECT_EQ(results.num_recoveries, 0) << steps;
    peaks.push_back(results.peak_memory_bytes);
  }
  EXPECT_EQ(peaks[0], peaks[1]) << "the larger windows make the peak, also where they come first";
}

TEST(Schedules, AnUpdateInsideBackwardIsForTheWindowsThatNeedIt) {
  set_log_quiet(true);
  RunCase run{"mlp", "hidden=64,layers=6", 8, 8, "adamw"};
  const ScratchFolder folder("schedule_in_backward");
  TrainingArguments arguments = arguments_of(run, std::int64_t{1} << 40, folder.path());
  arguments.max_grad_norm = 0;
  const RunPlan ample = PreparedRun(run, arguments).trainer->plan();
  const auto& owners = ample.bytes_by_owner;
  arguments.memory_budget_bytes = owners.at("weights") + owners.at("optimizer") +
                                  owners.at("other") + owners.at("inputs") +
                                  owners.at("gradients") * 3 / 4;
  ASSERT_TRUE(PreparedRun(run, arguments).trainer->plan().updates_in_backward());
  arguments.global_batch_size = 0;
  arguments.gradient_accumulation_steps = "0:1,1:4";
  arguments.report_to = "jsonl";
  arguments.max_steps = -1;
  arguments.num_train_epochs = 2;
  PreparedRun prepared(run, arguments);
  EXPECT_THROW(prepared.trainer->train(), BudgetError) << "four micro-batches need all gradients";
  EXPECT_FALSE(std::filesystem::exists(arguments.output_dir + "/metrics.jsonl"))
      << "said before training";
}

TEST(Peaks, AreThoseOfTrainingWhateverIsPlannedOrEvaluatedInBetween) {
  set_log_quiet(true);
  const TemporaryFolder folder;
  const auto data = std::make_shared<TableData>(64, 64, kClasses, 11);
  const auto peak_with = [&](const std::string& name, std::int64_t eval_samples) {
    TrainingArguments arguments = plain_arguments(folder / name);
    arguments.per_device_train_batch_size = 4;
    arguments.eval_strategy = "epoch";
    std::shared_ptr<TableData> eval_data;
    if (eval_samples > 0) {
      eval_data = std::make_shared<TableData>(eval_samples, 64, kClasses, 12);
      // Evaluation may load what it likes: here one large tensor for a moment.
      eval_data->on_load = [](c10::ArrayRef<std::int64_t>) { torch::zeros({1 << 22}); };
    }
    seed_everything(1);
    torch::nn::Sequential network(torch::nn::Linear(64, 32), torch::nn::Linear(32, kClasses));
    return Trainer(arguments, chain_of(network), data, eval_data).train().peak_memory_bytes;
  };
  const std::int64_t plain = peak_with("plain", 0);
  EXPECT_LT(peak_with("evaluating", 8) - plain, 1 << 16) << "its own samples and no more";
}

}  // namespace
}  // namespace headroom
