// Half precision in the trainer: loss scaling, autocast by request, and what a snapshot must agree
// with.
#include "train/budget_runs.h"
#include "train/training_support.h"

#include <headroom/core/error.h>
#include <headroom/execute/executor.h>
#include <headroom/optim/optimizer.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace headroom {
namespace {

using testing::metrics_of;
using testing::TableData;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Passes everything through, but a gradient that fp16 could not hold becomes infinite, as it would
/// in a network that computes in fp16. On request, so does that of one backward, counted from the
/// start.
struct Fp16Range : torch::autograd::Function<Fp16Range> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    const bool breaks = num_backwards++ == broken_backward;
    const at::Tensor beyond = gradients[0].abs() > largest;
    const double infinity = std::numeric_limits<double>::infinity();
    return {breaks ? at::full_like(gradients[0], infinity)
                   : gradients[0].masked_fill(beyond, infinity)};
  }
  static inline double largest = 65504;
  static inline std::int64_t num_backwards = 0;
  static inline std::int64_t broken_backward = -1;
};

constexpr std::int64_t kWindow = 8;

class Precision : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log_quiet(true);
    Fp16Range::largest = 65504;
    Fp16Range::num_backwards = 0;
    Fp16Range::broken_backward = -1;
  }

  // Every window has the same samples, so that a skipped update shows in nothing but the count.
  TrainingArguments arguments(const std::string& name, std::int64_t num_updates) const {
    TrainingArguments args = testing::plain_arguments(folder_.path() + "/" + name);
    args.fp16 = true;
    args.optim = "adamw";
    args.learning_rate = 1e-2;
    args.warmup_steps = 20;  // so that a step of the schedule too many or too few shows
    args.max_grad_norm = 0.5;
    args.per_device_train_batch_size = 2;
    args.gradient_accumulation_steps = "4";
    args.max_steps = num_updates;
    return args;
  }

  // `limited`: with gradients that have fp16's range.
  TrainResults train(const TrainingArguments& args, bool limited, std::uint64_t seed = 5) const {
    const torch::nn::Sequential network = testing::make_plain_network(seed);
    const auto first = std::dynamic_pointer_cast<torch::nn::LinearImpl>(network->ptr(0));
    const auto last = std::dynamic_pointer_cast<torch::nn::LinearImpl>(network->ptr(2));
    Chain chain;
    chain.add("first", first, [first, limited](const auto& x, const auto&) {
      const at::Tensor y = torch::tanh(first->forward(x[0]));
      return std::vector<at::Tensor>{limited ? Fp16Range::apply(y) : y};
    });
    chain.add("last", last, [last](const auto& x, const MicroBatch& micro) {
      return std::vector<at::Tensor>{summed_cross_entropy({last->forward(x[0])}, micro)};
    });
    return Trainer(args, chain,
                   std::make_shared<TableData>(kWindow, testing::kWidth, testing::kClasses, 11))
        .train();
  }

  ScratchFolder folder_{"precision"};
};

TEST_F(Precision, UpdatesThatOverflowAreSkippedAndTheScaleComesDown) {
  Fp16Range::largest =
      100;  // the gradients are some hundredths: 65536 and a few halves of it are too much
  const TrainResults limited = train(arguments("limited", 12), true);
  const std::int64_t num_skipped = limited.num_skipped_updates;
  ASSERT_GE(num_skipped, 2);
  ASSERT_LE(num_skipped, 9);
  const auto lines = metrics_of(folder_.path() + "/limited");
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto skipped = std::min<std::int64_t>(static_cast<std::int64_t>(i) + 1, num_skipped);
    EXPECT_EQ(lines[i]["loss_scale"], 65536 * std::pow(0.5, skipped)) << "update " << i + 1;
    EXPECT_EQ(lines[i]["skipped_updates"], skipped) << "update " << i + 1;
    EXPECT_TRUE(std::isfinite(lines[i]["loss"].get<double>()));
  }
  EXPECT_EQ(lines[static_cast<std::size_t>(num_skipped)]["learning_rate"],
            lines[0]["learning_rate"])
      << "the schedule waited";
  EXPECT_EQ(train(arguments("unlimited", 12 - num_skipped), false).weights_sha256,
            limited.weights_sha256)
      << "skipped updates leave no trace, and scales are powers of two";
}

TEST_F(Precision, AnOverflowInAnyMicroBatchOfAWindowSkipsThatWindowAlone) {
  const std::string expected = train(arguments("expected", 4), false).weights_sha256;
  for (std::int64_t position = 0; position < 4; ++position) {
    Fp16Range::num_backwards = 0;
    Fp16Range::broken_backward = 4 * 2 + position;  // in the third window
    const TrainResults results = train(arguments("broken" + std::to_string(position), 5), true);
    EXPECT_EQ(results.num_skipped_updates, 1) << position;
    EXPECT_EQ(results.weights_sha256, expected) << position;
  }
}

TEST_F(Precision, AResumedRunHasTheScaleOfTheOneThatWasInterrupted) {
  Fp16Range::largest = 100;
  TrainingArguments args = arguments("whole", 12);
  args.save_steps = 1;
  const TrainResults whole = train(args, true);
  const auto expected = metrics_of(args.output_dir);
  for (const int step : {1, 4, 11}) {
    TrainingArguments resumed = arguments("resumed" + std::to_string(step), 12);
    resumed.resume_from_checkpoint = args.output_dir + "/snapshot-" + std::to_string(step);
    const TrainResults results = train(resumed, true, 100);
    EXPECT_EQ(results.weights_sha256, whole.weights_sha256) << step;
    EXPECT_EQ(results.num_skipped_updates, whole.num_skipped_updates) << step;
    EXPECT_EQ(metrics_of(resumed.output_dir).back()["loss_scale"], expected.back()["loss_scale"])
        << step;
  }
}

TEST_F(Precision, WhatOverflowsWithoutAnyScaleIsAnErrorOnRequest) {
  Fp16Range::largest = 0;
  TrainingArguments args = arguments("hopeless", 40);
  args.error_on_nan = true;
  EXPECT_THROW(train(args, true), Error);
  EXPECT_EQ(metrics_of(args.output_dir).back()["loss_scale"], 1)
      << "as long as a smaller scale may help, there is no error";
}

TEST_F(Precision, LossScalingNeedsAllGradientsBeforeTheUpdate) {
  for (const bool fp16 : {false, true}) {
    const RunCase run{"mlp", "hidden=128,layers=8", 4, 4, "adamw"};
    TrainingArguments args = arguments_of(run, 0, folder_.path() + "/in_backward");
    args.max_grad_norm = 0;
    args.bf16 = !fp16;
    args.fp16 = fp16;
    const std::int64_t parameters = make_model(run.model, run.config).chain.num_parameters();
    args.memory_budget_bytes =
        parameters * 4 * 3 + parameters * 3;  // weights, optimizer and gradients are more
    PreparedRun prepared(run, args);
    if (fp16) {
      EXPECT_THROW(prepared.trainer->plan(), BudgetError);
    } else {
      EXPECT_TRUE(prepared.trainer->plan().updates_in_backward());
    }
  }
}

void expect_one_result_for_every_plan(const RunCase& run, TrainingArguments args) {
  const std::string backend = std::exchange(args.half_precision_backend, "auto");
  const TrainResults exact = PreparedRun(run, args).trainer->train();
  args.half_precision_backend = backend;
  args.bf16 = true;
  const TrainResults plain = PreparedRun(run, args).trainer->train();
  EXPECT_NE(plain.weights_sha256, exact.weights_sha256);
  EXPECT_NEAR(plain.final_loss, exact.final_loss, 0.02 * exact.final_loss);
  for (const char* policy : {"every", "sqrt"}) {
    TrainingArguments recomputing = args;
    recomputing.gradient_checkpointing = policy;
    const TrainResults results = PreparedRun(run, recomputing).trainer->train();
    EXPECT_GT(results.recomputed_forward_fraction, 0.0);
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256) << policy;
  }
  for (const double share : {0.1, 0.15, 0.2}) {
    args.memory_budget_bytes =
        plain.peak_memory_bytes -
        static_cast<std::int64_t>(share * static_cast<double>(plain.peak_activation_bytes));
    const TrainResults planned = PreparedRun(run, args).trainer->train();
    EXPECT_EQ(planned.weights_sha256, plain.weights_sha256)
        << "without " << share << " of the activations";
    EXPECT_LE(planned.peak_memory_bytes, args.memory_budget_bytes);
    EXPECT_LE(planned.peak_memory_bytes, planned.predicted_peak_bytes);
    EXPECT_LE(static_cast<double>(planned.predicted_peak_bytes),
              1.02 * static_cast<double>(planned.peak_memory_bytes));
    EXPECT_EQ(planned.num_recoveries, 0);
  }
}

TEST_F(Precision, EveryPlanGivesTheSameWeights) {
  for (const std::string backend : {"autocast", "keep"}) {
    for (const RunCase& run :
         {RunCase{"mlp", "hidden=48,layers=6,rows=8,columns=8", 256, 128, "adamw"},
          RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8,
                  4, "adamw"},
          RunCase{"bert",
                  "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=128,"
                  "max_position_"
                  "embeddings=32,vocab_size=64,dropout=0.1",
                  8, 4, "adamw"}}) {
      SCOPED_TRACE(backend + " " + run.model);
      TrainingArguments args = arguments_of(run, 0, folder_.path() + "/plans");
      args.half_precision_backend = backend;
      expect_one_result_for_every_plan(run, args);
    }
  }
}

TEST_F(Precision, ASnapshotIsContinuedInTheSamePrecisionOnly) {
  TrainingArguments args = arguments("computed", 2);
  args.fp16 = false;
  args.bf16 = true;
  args.half_precision_backend = "autocast";
  args.save_steps = 1;
  const TrainResults whole = train(args, false);
  TrainingArguments resumed = args;
  resumed.output_dir = folder_.path() + "/resumed";
  resumed.resume_from_checkpoint = args.output_dir + "/snapshot-1";
  EXPECT_EQ(train(resumed, false, 100).weights_sha256, whole.weights_sha256);
  resumed.half_precision_backend = "keep";
  try {
    train(resumed, false);
    FAIL() << "continued in another precision";
  } catch (const SnapshotError& error) {
    EXPECT_NE(std::string(error.what()).find("half_precision_backend 'autocast', not 'keep'"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace headroom
