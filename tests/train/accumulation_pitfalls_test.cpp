// One test per way in which a trainer that accumulates gradients is known to go wrong in one
// process. Those of the accumulator itself are in tests/execute/accumulator_pitfalls_test.cpp.

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/budget_runs.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class TrainingPitfall : public ::testing::Test {
 protected:
  TrainingPitfall() { set_log_quiet(true); }
  ~TrainingPitfall() override {
    set_log_quiet(false);
    MemoryMeter::instance().set_cap(0);
  }

  /// Windows of eight samples in micro-batches of two.
  TrainingArguments arguments(const std::string& name = "out") const {
    TrainingArguments arguments = plain_arguments(folder_ / name);
    arguments.per_device_train_batch_size = 2;
    arguments.gradient_accumulation_steps = "4";
    return arguments;
  }
  TemporaryFolder folder_;
};

/// Rows of six tokens of which some count: sample i has i % 7 of them.
class PaddedData final : public Dataset {
 public:
  static constexpr std::int64_t kLength = 6, kPadding = -100;
  PaddedData() {
    seed_everything(3);
    rows = torch::randn({14, kLength, kWidth});
    labels = torch::randint(kClasses, {14, kLength}, torch::kLong);
    for (std::int64_t i = 0; i < 14; ++i) labels[i].slice(0, i % 7).fill_(kPadding);
  }
  std::int64_t size() const override { return rows.size(0); }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const at::Tensor chosen = torch::tensor(indices, torch::kLong);
    return {{rows.index_select(0, chosen)},
            {labels.index_select(0, chosen)},
            static_cast<std::int64_t>(indices.size()),
            count_items(indices)};
  }
  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    std::int64_t items = 0;
    for (const std::int64_t index : indices) items += index % 7;
    return items;
  }
  at::Tensor rows, labels;
};

TEST_F(TrainingPitfall, MeanOfMeans) {
  const auto data = std::make_shared<PaddedData>();
  const auto summed = [](const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
    return torch::nn::functional::cross_entropy(
        outputs[0].flatten(0, 1), micro.targets[0].flatten(),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  };
  TrainingArguments args = arguments();
  args.gradient_accumulation_steps = "7";
  args.max_steps = 1;
  torch::nn::Sequential ours = make_plain_network(5), theirs = make_plain_network(5);
  const TrainResults results =
      Trainer(args, Chain::from_sequential(ours.ptr(), summed), data).train();
  const at::Tensor loss = torch::nn::functional::cross_entropy(
      theirs->forward(data->rows).flatten(0, 1), data->labels.flatten());
  loss.backward();
  EXPECT_NEAR(results.final_loss, loss.item<double>(), 1e-6);
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : theirs->parameters()) parameter.sub_(parameter.grad(), 0.1);
  expect_close(ours, theirs, 1e-6);
}

TEST_F(TrainingPitfall, ActivationsOfAllMicroBatchesStayAliveOrGradientsAreCopied) {
  const auto peaks = [&](const std::string& steps) {
    TrainingArguments args = arguments(steps);
    args.gradient_accumulation_steps = steps;
    return Trainer(args, chain_of(make_plain_network(5)), make_data()).train().peak_bytes_by_owner;
  };
  const auto two = peaks("2"), ten = peaks("10");
  EXPECT_EQ(ten.at("activations"), two.at("activations"));
  EXPECT_EQ(ten.at("gradients"), two.at("gradients"));
  EXPECT_EQ(ten.at("gradients"), ten.at("weights")) << "one gradient for each weight and no copy";
}

TEST_F(TrainingPitfall, LoggedLossNormOrThroughputOffByAFactorOfN) {
  const TrainingArguments args = arguments();
  const auto data = make_data();
  const TrainResults results = Trainer(args, chain_of(make_plain_network(5)), data).train();
  torch::nn::Sequential theirs = make_plain_network(5);
  const auto windows = plain_windows(kSamples, 8, 2);
  const auto metrics = metrics_of(args.output_dir);
  ASSERT_EQ(metrics.size(), windows.size());
  for (std::size_t i = 0; i < windows.size(); ++i) {
    double norm = 0.0;
    const double loss = plain_update(theirs, *data, windows[i], 0.1, &norm);
    EXPECT_NEAR(metrics[i]["loss"].get<double>(), loss, 1e-5 * loss) << i;
    EXPECT_NEAR(metrics[i]["grad_norm"].get<double>(), norm, 1e-4 * norm) << i;
  }
  EXPECT_NEAR(results.train_samples_per_second * results.train_runtime, 2 * kSamples, 1e-6);
  EXPECT_NEAR(results.train_steps_per_second * results.train_runtime, 6, 1e-6);
  EXPECT_EQ(results.global_step, 6) << "updates, not micro-batches";
}

TEST_F(TrainingPitfall, LastPartialWindowDroppedDividedByFullNOrLeakedIntoTheNextEpoch) {
  const TrainingArguments args = arguments();  // 21 samples: two windows of 8 and one of 5, of
                                               // which the last micro-batch has one
  const auto data = make_data();
  torch::nn::Sequential ours = make_plain_network(5), theirs = make_plain_network(5);
  Trainer(args, chain_of(ours), data).train();
  for (const auto& window : plain_windows(kSamples, 8, 2)) plain_update(theirs, *data, window, 0.1);
  expect_close(ours, theirs, 1e-6);
}

TEST_F(TrainingPitfall, SchedulerSteppedPerMicroBatch) {
  TrainingArguments args = arguments();
  args.lr_scheduler_type = "linear";
  Trainer(args, chain_of(make_plain_network(5)), make_data()).train();
  const auto metrics = metrics_of(args.output_dir);
  ASSERT_EQ(metrics.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(metrics[i]["learning_rate"].get<double>(), 0.1 * static_cast<double>(6 - i) / 6,
                1e-12)
        << "update " << i + 1;
  }
}

TEST_F(TrainingPitfall, ResumeCountsMicroBatchesAsStepsLosesGradientsOrReplaysData) {
  using Loads = std::vector<std::vector<std::int64_t>>;
  const auto run = [&](const std::string& name, const std::string& from, Loads& loads) {
    TrainingArguments args = arguments(name);
    args.shuffle = true;
    args.optim = "adamw";
    args.save_steps = 4;  // in the middle of the second epoch of three updates
    args.resume_from_checkpoint = from;
    const auto data = make_data();
    data->on_load = [&](c10::ArrayRef<std::int64_t> indices) { loads.push_back(indices.vec()); };
    seed_everything(from.empty() ? 5 : 6);
    torch::nn::Sequential network(torch::nn::Linear(kWidth, 16), torch::nn::Dropout(0.3),
                                  torch::nn::Linear(16, kClasses));
    return Trainer(args, chain_of(network), data).train();
  };
  Loads all, rest;
  const TrainResults whole = run("whole", "", all);
  const TrainResults resumed = run("resumed", folder_ / "whole/snapshot-4", rest);
  EXPECT_EQ(resumed.global_step, whole.global_step);
  EXPECT_EQ(resumed.weights_sha256, whole.weights_sha256);
  ASSERT_EQ(all.size(), 22U) << "4 + 4 + 3 micro-batches in an epoch";
  EXPECT_EQ(rest, Loads(all.begin() + 15, all.end()))
      << "the data after update 4, and nothing twice";
}

TEST_F(TrainingPitfall, ResumeHoldsWeightsOrOptimizerStateTwice) {
  // Where weights and optimizer are nearly all there is, a second copy of either would break the
  // budget that the run was trained in.
  const RunCase run{"mlp", "hidden=256,layers=6", 2, 1, "adamw"};
  TrainingArguments args = arguments_of(run, 0, folder_ / "out");
  args.save_steps = 3;
  args.memory_budget_bytes = budget_range(run, folder_ / "floor").floor_bytes;
  const TrainResults whole = PreparedRun(run, args).trainer->train();
  const std::int64_t weights = whole.peak_bytes_by_owner.at("weights");
  ASSERT_LT(args.memory_budget_bytes, 9 * weights / 2)
      << "weights, gradients, two moments and little else";
  args.resume_from_checkpoint = folder_ / "out/snapshot-3";
  PreparedRun resumed(run, args);
  MemoryMeter::instance().reset_peak();
  EXPECT_EQ(resumed.trainer->train().weights_sha256, whole.weights_sha256);
}

TEST_F(TrainingPitfall, AutomaticBatchSizeChangesTheGlobalBatch) {
  const RunCase run{"mlp", "hidden=64,layers=6", 32, 0, "adamw"};
  const TrainResults plain = train(run, 0, folder_ / "plain");
  ASSERT_EQ(plain.micro_batch_size, 32);
  const std::int64_t floor =
      budget_range({run.model, run.config, 32, 1, run.optim}, folder_ / "floor").floor_bytes;
  for (const std::int64_t budget : {floor, (3 * floor + plain.peak_memory_bytes) / 4}) {
    TrainingArguments args = arguments_of(run, budget, folder_ / "small");
    args.report_to = "jsonl";
    const TrainResults results = PreparedRun(run, args).trainer->train();
    EXPECT_LT(results.micro_batch_size, 32);
    for (const auto& line : metrics_of(args.output_dir))
      EXPECT_EQ(line["samples"], 32) << "in update " << line["step"];
    EXPECT_EQ(results.global_step, plain.global_step);
    EXPECT_NEAR(results.final_loss, plain.final_loss, 1e-5 * plain.final_loss);
  }
}

TEST_F(TrainingPitfall, ARetriedStepIsLostOrItsBatchSplitAgain) {
  const RunCase run{"mlp", "hidden=64,layers=6", 32, 0, "adamw"};
  const TrainResults plain = train(run, 0, folder_ / "plain");
  const std::int64_t floor =
      budget_range({run.model, run.config, 32, 1, run.optim}, folder_ / "floor").floor_bytes;
  for (const int at : {2, 4}) {
    TrainingArguments args = arguments_of(run, 2 * plain.peak_memory_bytes, folder_ / "retried");
    args.report_to = "jsonl";
    // Less memory in the middle than the split takes that is fastest here: the step is made again
    // in smaller micro-batches, each time from the whole window.
    const std::int64_t planned = PreparedRun(run, args).trainer->plan().predicted_peak_bytes();
    PreparedRun prepared(run, args, [&](auto data) {
      return std::make_shared<CapLoweringData>(data, at, floor + (planned - floor) / 4);
    });
    const TrainResults results = prepared.trainer->train();
    EXPECT_GT(results.num_recoveries, 0) << at;
    EXPECT_EQ(results.global_step, plain.global_step);
    for (const auto& line : metrics_of(args.output_dir))
      EXPECT_EQ(line["samples"], 32) << "in update " << line["step"];
    EXPECT_NEAR(results.final_loss, plain.final_loss, 1e-5 * plain.final_loss);
  }
}

TEST_F(TrainingPitfall, OutOfMemoryOnTheFirstRealStepAfterTheProbe) {
  for (const char* optim : {"sgd", "adamw", "adafactor"}) {
    const RunCase run{"gpt", "n_layer=3,n_head=2,n_embd=32,block_size=16,vocab_size=64", 8, 4,
                      optim};
    const std::int64_t predicted = [&] {
      const std::int64_t budget = budget_range(run, folder_ / "floor").floor_bytes;
      return PreparedRun(run, arguments_of(run, budget, folder_ / "plan"))
          .trainer->plan()
          .predicted_peak_bytes();
    }();
    // Not a byte more than the plan says: backward and the optimizer's step are in it.
    const TrainResults results = train(run, predicted, folder_ / "out");
    EXPECT_EQ(results.num_recoveries, 0) << optim;
    EXPECT_EQ(results.global_step, 5) << optim;
    EXPECT_LE(results.peak_memory_bytes, predicted) << optim;
  }
}

TEST_F(TrainingPitfall, OptimizerInBackwardIsSilentlyWrong) {
  // The budget holds weights, moments and three quarters of the gradients: enough for updates
  // inside backward, which would apply the gradient of a part of the window if there were several
  // micro-batches.
  const auto arguments_for = [&](const RunCase& run) {
    TrainingArguments args = arguments_of(run, 0, folder_ / "out");
    args.max_grad_norm = 0.0;
    const TrainResults plain = PreparedRun(run, args).trainer->train();
    args.memory_budget_bytes =
        plain.num_parameters * 4 * 3 + plain.peak_bytes_by_owner.at("gradients") * 3 / 4;
    return args;
  };
  const RunCase one{"mlp", "hidden=128,layers=8", 4, 4, "adamw"},
      two{"mlp", "hidden=128,layers=8", 4, 2, "adamw"};
  EXPECT_TRUE(PreparedRun(one, arguments_for(one)).trainer->plan().updates_in_backward());
  EXPECT_THROW(PreparedRun(two, arguments_for(two)).trainer->train(), BudgetError);
}

TEST_F(TrainingPitfall, BatchNormIsNotTheLargeBatchAndNobodySaysSo) {
  // In a process of its own, because the warning is given once in each; a new one, because threads
  // do not survive a fork.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        set_log_quiet(false);
        TrainingArguments args = arguments();
        args.max_steps = 1;
        Trainer(args, chain_of(make_noisy_network(5)), make_data()).train();
        Trainer(args, chain_of(make_noisy_network(5)), make_data()).train();
        std::fprintf(stderr, "end\n");
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "^[^']*'1' is a BatchNorm[^']*end\n$");
}

}  // namespace
}  // namespace headroom
