#include <headroom/train/trainer.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>

#include <gtest/gtest.h>

#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class TrainerTest : public ::testing::Test {
 protected:
  TrainingArguments arguments(const std::string& name = "out") const {
    return plain_arguments(folder_ / name);
  }
  TemporaryFolder folder_;
};

// Trains the same network by the trainer and by the plain loop over `windows`; compares losses,
// gradient norms and weights.
void expect_plain_numbers(const TrainingArguments& arguments,
                          const std::vector<std::vector<std::int64_t>>& windows) {
  const auto data = make_data();
  torch::nn::Sequential ours = make_plain_network(5);
  const TrainResults results = Trainer(arguments, chain_of(ours), data).train();
  torch::nn::Sequential theirs = make_plain_network(5);
  ASSERT_EQ(results.global_step, static_cast<std::int64_t>(windows.size()));
  const auto metrics = metrics_of(arguments.output_dir);
  ASSERT_EQ(metrics.size(), windows.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    double norm = 0.0;
    const double loss = plain_update(theirs, *data, windows[i], arguments.learning_rate, &norm);
    EXPECT_NEAR(metrics[i]["loss"].get<double>(), loss, 1e-5 * loss) << "update " << i + 1;
    EXPECT_NEAR(metrics[i]["grad_norm"].get<double>(), norm, 1e-4 * norm) << "update " << i + 1;
    EXPECT_EQ(metrics[i]["samples"], windows[i].size());
    sum += loss;
  }
  EXPECT_NEAR(results.train_loss, sum / static_cast<double>(windows.size()), 1e-5);
  expect_close(ours, theirs, 1e-5);
}

TEST_F(TrainerTest, AccumulationEqualsTheWholeWindowAlsoInTheLastPartialOne) {
  for (const auto& [micro, steps] :
       std::vector<std::pair<int, const char*>>{{8, "1"}, {4, "2"}, {2, "4"}, {1, "8"}}) {
    TrainingArguments args = arguments(std::to_string(micro));
    args.per_device_train_batch_size = micro;
    args.gradient_accumulation_steps = steps;
    SCOPED_TRACE(micro);
    expect_plain_numbers(args, plain_windows(kSamples, 8, 2));
  }
}

TEST_F(TrainerTest, AGlobalBatchIsSplitIntoBalancedMicroBatches) {
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 3;
  args.global_batch_size = 8;
  expect_plain_numbers(args, plain_windows(kSamples, 8, 2));

  const auto data = make_data();
  std::vector<std::size_t> sizes;
  data->on_load = [&](c10::ArrayRef<std::int64_t> indices) { sizes.push_back(indices.size()); };
  args.num_train_epochs = 1;
  const TrainResults results = Trainer(args, chain_of(make_plain_network(5)), data).train();
  EXPECT_EQ(sizes, (std::vector<std::size_t>{3, 3, 2, 3, 3, 2, 3, 2}));
  EXPECT_EQ(results.micro_batch_size, 3);
  EXPECT_EQ(results.gradient_accumulation_steps, 3);
}

TEST_F(TrainerTest, DropLastLeavesThePartialWindowOut) {
  TrainingArguments args = arguments();
  args.dataloader_drop_last = true;
  auto windows = plain_windows(16, 8, 2);
  expect_plain_numbers(args, windows);
}

TEST_F(TrainerTest, TheAccumulationScheduleChangesBetweenEpochs) {
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 4;
  args.gradient_accumulation_steps = "0:1,1:4";
  auto windows = plain_windows(kSamples, 4, 1);
  for (const auto& window : plain_windows(kSamples, 16, 1)) windows.push_back(window);
  expect_plain_numbers(args, windows);
}

TEST_F(TrainerTest, ABatchLargerThanTheDataIsTheData) {
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 1000;
  expect_plain_numbers(args, plain_windows(kSamples, kSamples, 2));
}

TEST_F(TrainerTest, MaxStepsAndFractionsOfEpochsEndTheRun) {
  TrainingArguments args = arguments();
  args.max_steps = 7;
  auto windows = plain_windows(kSamples, 8, 3);
  windows.resize(7);
  expect_plain_numbers(args, windows);
  args = arguments("fraction");
  args.num_train_epochs = 1.5;
  windows.resize(5);
  expect_plain_numbers(args, windows);
}

TEST_F(TrainerTest, ClippingUsesTheNormOfTheGlobalBatch) {
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 2;
  args.gradient_accumulation_steps = "4";
  args.max_grad_norm = 0.05;
  args.max_steps = 1;
  const auto data = make_data();
  torch::nn::Sequential ours = make_plain_network(5);
  Trainer(args, chain_of(ours), data).train();
  torch::nn::Sequential theirs = make_plain_network(5);
  torch::nn::Sequential probe = make_plain_network(5);
  double norm = 0.0;
  plain_update(probe, *data, range(0, 8), 0.1, &norm);
  ASSERT_GT(norm, 0.05);
  plain_update(theirs, *data, range(0, 8), 0.1 * 0.05 / (norm + 1e-6));
  expect_close(ours, theirs, 1e-6);
}

TEST_F(TrainerTest, TheLearningRateFollowsTheScheduleOncePerUpdate) {
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 2;
  args.gradient_accumulation_steps = "4";
  args.lr_scheduler_type = "linear";
  args.warmup_steps = 2;
  args.scale_lr_by_batch = 4;
  Trainer(args, chain_of(make_plain_network(5)), make_data()).train();
  const auto metrics = metrics_of(args.output_dir);
  const double top = 0.1 * 8 / 4;
  const std::vector<double> expected = {0, top / 2, top, top * 3 / 4, top / 2, top / 4};
  ASSERT_EQ(metrics.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(metrics[i]["learning_rate"].get<double>(), expected[i], 1e-12) << i;
}

TEST_F(TrainerTest, AnUpdateThatIsNotFiniteIsSkippedCountedAndNamed) {
  const auto data = make_data();
  data->rows[9][2] = std::nan("");
  TrainingArguments args = arguments();
  args.per_device_train_batch_size = 2;
  args.gradient_accumulation_steps = "4";
  args.num_train_epochs = 1;
  torch::nn::Sequential ours = make_plain_network(5);
  ::testing::internal::CaptureStderr();
  const TrainResults results = Trainer(args, chain_of(ours), data).train();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(results.num_skipped_updates, 1);
  EXPECT_EQ(results.global_step, 3);
  EXPECT_NE(text.find("update 2"), std::string::npos) << text;
  EXPECT_NE(text.find("0.weight"), std::string::npos) << text;
  torch::nn::Sequential theirs = make_plain_network(5);
  const double first = plain_update(theirs, *data, range(0, 8), 0.1);
  const double last = plain_update(theirs, *data, range(16, 21), 0.1);
  expect_close(ours, theirs, 1e-6);
  EXPECT_NEAR(results.train_loss, (first + last) / 2, 1e-5) << "the mean of what was trained on";
  EXPECT_TRUE(metrics_of(args.output_dir)[1]["loss"].is_null());
  EXPECT_EQ(metrics_of(args.output_dir)[2]["skipped_updates"], 1);
}

TEST_F(TrainerTest, AnUpdateThatIsNotFiniteIsAnErrorOnRequest) {
  const auto data = make_data();
  data->rows[9][2] = std::nan("");
  TrainingArguments args = arguments();
  args.error_on_nan = true;
  torch::nn::Sequential network = make_plain_network(5);
  try {
    Trainer(args, chain_of(network), data).train();
    FAIL() << "trained on NaN";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("0.weight"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("update 2"), std::string::npos) << error.what();
  }
  for (const at::Tensor& parameter : network->parameters())
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
}

// Everything that could go wrong at once: dropout, BatchNorm, shuffling, AdamW, a falling learning
// rate, accumulation, a partial window.
TrainingArguments noisy_arguments(const std::string& output_dir) {
  TrainingArguments arguments = plain_arguments(output_dir);
  arguments.shuffle = true;
  arguments.optim = "adamw";
  arguments.learning_rate = 1e-2;
  arguments.weight_decay = 0.01;
  arguments.lr_scheduler_type = "cosine";
  arguments.max_grad_norm = 1.0;
  arguments.per_device_train_batch_size = 4;
  arguments.gradient_accumulation_steps = "2";
  arguments.num_train_epochs = 3;
  return arguments;
}

TrainResults train_noisily(const TrainingArguments& arguments, std::uint64_t seed = 5) {
  return Trainer(arguments, chain_of(make_noisy_network(seed)), make_data()).train();
}

std::vector<std::pair<int, double>> losses_of(const std::string& output_dir) {
  std::vector<std::pair<int, double>> losses;
  for (const auto& line : metrics_of(output_dir)) losses.emplace_back(line["step"], line["loss"]);
  return losses;
}

TEST_F(TrainerTest, EqualRunsHaveEqualWeightsAndOthersDoNot) {
  const std::string sha = train_noisily(noisy_arguments(folder_ / "a")).weights_sha256;
  EXPECT_EQ(sha.size(), 64U);
  EXPECT_EQ(train_noisily(noisy_arguments(folder_ / "b")).weights_sha256, sha);
  EXPECT_NE(train_noisily(noisy_arguments(folder_ / "c"), 6).weights_sha256, sha);
  TrainingArguments other = noisy_arguments(folder_ / "d");
  other.data_seed = 7;
  EXPECT_NE(train_noisily(other).weights_sha256, sha);
}

TEST_F(TrainerTest, TheHashCoversBuffers) {
  torch::nn::Sequential network = make_noisy_network(5);
  const std::string before = weights_sha256(chain_of(network));
  network->named_buffers()["1.running_mean"].add_(1);
  EXPECT_NE(weights_sha256(chain_of(network)), before);
}

TEST_F(TrainerTest, PrefetchingChangesNoNumber) {
  const TrainResults plain = train_noisily(noisy_arguments(folder_ / "plain"));
  TrainingArguments prefetching = noisy_arguments(folder_ / "prefetching");
  prefetching.dataloader_num_workers = 1;
  EXPECT_EQ(train_noisily(prefetching).weights_sha256, plain.weights_sha256);
  EXPECT_EQ(losses_of(folder_ / "prefetching"), losses_of(folder_ / "plain"));
}

TEST_F(TrainerTest, CheckpointingChangesNoNumber) {
  const TrainResults plain = train_noisily(noisy_arguments(folder_ / "plain"));
  EXPECT_EQ(plain.recomputed_forward_fraction, 0.0);
  for (const char* policy : {"every", "sqrt", "segments=2"}) {
    TrainingArguments args = noisy_arguments(folder_ / policy);
    args.gradient_checkpointing = policy;
    args.recompute_check = true;
    const TrainResults results = train_noisily(args);
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256) << policy;
    EXPECT_EQ(losses_of(folder_ / policy), losses_of(folder_ / "plain")) << policy;
    EXPECT_GT(results.recomputed_forward_fraction, 0.0) << policy;
  }
}

TEST_F(TrainerTest, ResumingFromAnyUpdateIsTheSameAsNeverHavingStopped) {
  TrainingArguments args = noisy_arguments(folder_ / "whole");
  args.save_steps = 1;
  const TrainResults whole = train_noisily(args);
  ASSERT_EQ(whole.global_step, 9);
  for (int step = 1; step <= 9; ++step) {
    TrainingArguments resumed = noisy_arguments(folder_ / ("resumed" + std::to_string(step)));
    resumed.resume_from_checkpoint = folder_ / ("whole/snapshot-" + std::to_string(step));
    const TrainResults results =
        train_noisily(resumed, 100 + step);  // other weights and random state to begin with
    EXPECT_EQ(results.weights_sha256, whole.weights_sha256) << step;
    EXPECT_EQ(results.global_step, 9);
    EXPECT_EQ(results.epoch, whole.epoch);
    EXPECT_EQ(results.train_loss, whole.train_loss) << step;
  }
}

TEST_F(TrainerTest, AStopSavesASnapshotToGoOnFrom) {
  const TrainResults whole = train_noisily(noisy_arguments(folder_ / "whole"));
  TrainingArguments args = noisy_arguments(folder_ / "cut");
  {
    const auto data = make_data();
    int num_loaded = 0;
    data->on_load = [&](c10::ArrayRef<std::int64_t>) {
      if (++num_loaded == 9)
        Trainer::request_stop();  // in the first micro-batch of update 5: 2 + 2 + 2 (4 and 1
                                  // samples) + 2 come before
    };
    Trainer trainer(args, chain_of(make_noisy_network(5)), data);
    const TrainResults results = trainer.train();
    EXPECT_TRUE(trainer.was_interrupted());
    EXPECT_EQ(results.global_step, 4) << "the update in progress is undone";
  }
  args.resume_from_checkpoint = "last";
  Trainer trainer(args, chain_of(make_noisy_network(9)), make_data());
  EXPECT_EQ(trainer.train().weights_sha256, whole.weights_sha256);
  EXPECT_FALSE(trainer.was_interrupted());
  EXPECT_EQ(losses_of(folder_ / "cut"), losses_of(folder_ / "whole"));
}

TEST_F(TrainerTest, OnlyTheNewestSnapshotsAreKept) {
  TrainingArguments args = arguments();
  args.save_steps = 1;
  args.save_total_limit = 2;
  args.max_steps = 11;
  Trainer(args, chain_of(make_plain_network(5)), make_data()).train();
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(args.output_dir)) {
    const std::string name = entry.path().filename();
    if (name.find("snapshot") != std::string::npos) names.insert(name);
  }
  EXPECT_EQ(names, (std::set<std::string>{"snapshot-10", "snapshot-11"}))
      << "and nothing temporary";
}

TEST_F(TrainerTest, ANewRunInTheSameFolderStartsANewLog) {
  for (int run = 0; run < 2; ++run) {
    Trainer(arguments(), chain_of(make_plain_network(5)), make_data()).train();
    EXPECT_EQ(metrics_of(folder_ / "out").size(), 6U);
  }
}

TEST_F(TrainerTest, PeakMemoryDoesNotGrowWithTheNumberOfAccumulationSteps) {
  const auto data = std::make_shared<TableData>(256, 64, kClasses, 11);
  const auto peaks = [&](int micro, int steps) {
    const std::int64_t before = MemoryMeter::instance().live_bytes();
    TrainingArguments args = arguments("steps");
    args.per_device_train_batch_size = micro;
    args.gradient_accumulation_steps = std::to_string(steps);
    args.max_steps = 2;
    seed_everything(1);
    const ZooModel model = make_model("mlp", "hidden=128,rows=8,columns=8,classes=3");
    const TrainResults results = Trainer(args, model.chain, data).train();
    return std::pair<std::int64_t, std::int64_t>(results.peak_memory_bytes - before,
                                                 results.peak_activation_bytes);
  };
  const auto two = peaks(16, 2);
  EXPECT_EQ(peaks(16, 4), two);
  EXPECT_EQ(peaks(16, 16), two);
  const auto whole = peaks(64, 1);
  EXPECT_LT(two.first, whole.first);
  EXPECT_NEAR(static_cast<double>(whole.second) / static_cast<double>(two.second), 4.0, 0.2)
      << "activations shrink with the micro-batch";
}

TEST_F(TrainerTest, AMemoryBudgetIsKeptAndChangesNoNumber) {
  const auto data = std::make_shared<TableData>(256, 64, kClasses, 11);
  const auto train = [&](const std::string& name, std::int64_t budget) {
    TrainingArguments args = arguments(name);
    args.per_device_train_batch_size = 256;
    args.memory_budget_bytes = budget;
    seed_everything(1);
    torch::nn::Sequential network;
    network->push_back(torch::nn::Linear(64, 32));
    for (int i = 0; i < 6; ++i) {
      network->push_back(torch::nn::Tanh());
      network->push_back(torch::nn::Linear(32, 32));
    }
    network->push_back(torch::nn::Linear(32, kClasses));
    return Trainer(args, chain_of(network), data).train();
  };
  const TrainResults free = train("free", 0);
  const std::int64_t budget = free.peak_memory_bytes - free.peak_activation_bytes / 4;
  const TrainResults planned = train("planned", budget);
  MemoryMeter::instance().set_cap(0);
  EXPECT_LE(planned.peak_memory_bytes, budget);
  EXPECT_GT(planned.recomputed_forward_fraction, 0.0);
  EXPECT_EQ(planned.weights_sha256, free.weights_sha256);
  EXPECT_EQ(planned.num_recoveries, 0);
  const auto timeline =
      nlohmann::json::parse(read_file(folder_ / "planned/plan.json")).at("timeline");
  const auto events =
      nlohmann::json::parse(read_file(folder_ / "planned/trace.json")).at("traceEvents");
  ASSERT_EQ(events.size(), 2 * timeline.size()) << "an operation and its bytes";
  std::int64_t most = 0;
  for (std::size_t i = 0; i < timeline.size(); ++i) {
    most = std::max(most, timeline[i].at("live_bytes").get<std::int64_t>());
    EXPECT_EQ(events[2 * i + 1].at("args"), timeline[i].at("by_owner"));
  }
  EXPECT_GT(most, 0);
  EXPECT_LE(most, planned.peak_memory_bytes);
  EXPECT_EQ(events.back().at("args").at("gradients"),
            events[events.size() - 3].at("args").at("weights"))
      << "all gradients are there";
}

TEST_F(TrainerTest, EvaluatesLossAndAccuracy) {
  const auto train_data = make_data();
  const auto eval_data = std::make_shared<TableData>(13, kWidth, kClasses, 12);
  TrainingArguments args = arguments();
  args.eval_strategy = "epoch";
  torch::nn::Sequential network = make_noisy_network(5);
  const TrainResults results = Trainer(args, chain_of(network), train_data, eval_data).train();
  ASSERT_TRUE(results.eval.has_value());
  network->eval();
  const at::Tensor scores = network->forward(eval_data->rows);
  EXPECT_NEAR(results.eval->loss,
              torch::nn::functional::cross_entropy(scores, eval_data->labels).item<double>(), 1e-6);
  EXPECT_EQ(results.eval->accuracy,
            scores.argmax(1).eq(eval_data->labels).sum().item<double>() / 13);
  EXPECT_EQ(results.eval->num_samples, 13);
  std::vector<double> epochs;
  for (const auto& line : metrics_of(args.output_dir)) {
    if (line.contains("eval_loss")) epochs.push_back(line["epoch"]);
  }
  EXPECT_EQ(epochs, (std::vector<double>{1, 2})) << "once per epoch, and not again at the end";
}

TEST_F(TrainerTest, EvaluationChangesNoNumber) {
  const TrainResults plain = train_noisily(noisy_arguments(folder_ / "plain"));
  TrainingArguments args = noisy_arguments(folder_ / "evaluating");
  args.eval_strategy = "steps";
  args.eval_steps = 1;
  const TrainResults results = Trainer(args, chain_of(make_noisy_network(5)), make_data(),
                                       std::make_shared<TableData>(13, kWidth, kClasses, 12))
                                   .train();
  EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
}

TEST_F(TrainerTest, FilesHaveThePromisedKeys) {
  TrainingArguments args = arguments();
  const TrainResults results =
      Trainer(args, chain_of(make_plain_network(5)), make_data(), make_data(5)).train();
  const auto written = nlohmann::json::parse(read_file(args.output_dir + "/train_results.json"));
  EXPECT_EQ(written["weights_sha256"], results.weights_sha256);
  EXPECT_EQ(written["num_parameters"], kWidth * 16 + 16 + 16 * kClasses + kClasses);
  EXPECT_EQ(written["global_step"], 6);
  EXPECT_EQ(written["epoch"], 2.0);
  EXPECT_EQ(written["world_size"], 1);
  EXPECT_EQ(written["memory_budget_bytes"], 0);
  for (const char* owner :
       {"weights", "gradients", "optimizer", "activations", "inputs", "other"}) {
    EXPECT_TRUE(written["peak_bytes_by_owner"].contains(owner)) << owner;
  }
  const std::int64_t parameter_bytes = 4 * written["num_parameters"].get<std::int64_t>();
  EXPECT_EQ(written["peak_bytes_by_owner"]["weights"], parameter_bytes);
  EXPECT_EQ(written["peak_bytes_by_owner"]["gradients"], parameter_bytes);
  EXPECT_EQ(written["peak_bytes_by_owner"]["inputs"], 8 * (kWidth * 4 + 8 + 8))
      << "rows, labels and, while they are read, indices";
  EXPECT_TRUE(written.contains("eval_loss") && written.contains("eval_accuracy"));
  for (const char* key : {"step", "epoch", "loss", "grad_norm", "learning_rate"}) {
    EXPECT_TRUE(metrics_of(args.output_dir)[0].contains(key)) << key;
  }
}

TEST_F(TrainerTest, NothingIsReportedOnRequest) {
  TrainingArguments args = arguments();
  args.report_to = "none";
  Trainer(args, chain_of(make_plain_network(5)), make_data()).train();
  EXPECT_FALSE(std::filesystem::exists(args.output_dir + "/metrics.jsonl"));
  EXPECT_TRUE(std::filesystem::exists(args.output_dir + "/train_results.json"));
}

TEST_F(TrainerTest, RefusesWhatCannotBeTrained) {
  EXPECT_THROW(Trainer(arguments(), Chain(), make_data()), ConfigError);
  EXPECT_THROW(Trainer(arguments(), chain_of(make_plain_network(5)), nullptr), DataError);
  torch::nn::Sequential frozen = make_plain_network(5);
  for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  EXPECT_THROW(Trainer(arguments(), chain_of(frozen), make_data()), ConfigError);
  TrainingArguments args = arguments();
  args.optim = "sdg";
  EXPECT_THROW(Trainer(args, chain_of(make_plain_network(5)), make_data()), ConfigError);
}

}  // namespace
}  // namespace headroom
