// A loss over the samples of the whole global batch, trained in micro-batches.
#include <headroom/core/error.h>
#include <headroom/train/estimate.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/budget_runs.h"
#include "train/compared_chain.h"

namespace headroom {
namespace {

using namespace headroom::testing;

const char* const kClip =
    "vision_num_hidden_layers=2,vision_num_attention_heads=2,vision_hidden_size=32,vision_"
    "intermediate_size=64,text_num_hidden_layers=2,text_num_attention_heads=2,text_hidden_size=32,"
    "text_intermediate_size=128,image_size=20,length=16,vocab_size=40,projection_dim=16";

struct Trained {
  TrainResults results;
  std::vector<at::Tensor> weights;
};

Trained train_clip(std::int64_t micro_batch, std::int64_t budget_bytes, const std::string& folder,
                   const std::string& more = "") {
  MemoryMeter::instance().set_cap(0);
  const RunCase run{"clip", kClip + more, 16, micro_batch, "sgd"};
  TrainingArguments arguments = arguments_of(run, budget_bytes, folder);
  arguments.learning_rate = 0.1;
  arguments.max_steps = 3;
  seed_everything(1);
  const ZooModel model = make_model(run.model, run.config);
  Trained trained{Trainer(arguments, model.chain, data_for(model.input)).train(), {}};
  for (const at::Tensor& parameter : model.chain.parameters())
    trained.weights.push_back(parameter.detach());
  MemoryMeter::instance().set_cap(0);
  return trained;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1e-30, b[i].abs().max().item<double>());
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return largest;
}

TEST(ContrastiveTraining, EverySplitTrainsTheWholeBatch) {
  set_log_quiet(true);
  const ScratchFolder folder("splits");
  const Trained whole = train_clip(16, 0, folder.path());
  for (const std::int64_t micro_batch : {1, 4, 5}) {
    const Trained parts = train_clip(micro_batch, 0, folder.path());
    EXPECT_EQ(parts.results.micro_batch_size, micro_batch);
    EXPECT_NEAR(parts.results.train_loss, whole.results.train_loss, 1e-5);
    EXPECT_LE(largest_difference(parts.weights, whole.weights), 1e-5) << micro_batch;
    EXPECT_LT(parts.results.peak_activation_bytes, whole.results.peak_activation_bytes / 2);
  }
}

TEST(ContrastiveTraining, ThePlannerSplitsBelowTheFloorOfTheWholeBatch) {
  set_log_quiet(true);
  const ScratchFolder folder("planned");
  const Trained whole = train_clip(16, 0, folder.path());
  const std::int64_t floor =
      budget_range(RunCase{"clip", kClip, 16, 16, "sgd"}, folder.path()).floor_bytes;
  const Trained planned = train_clip(0, floor - (floor / 10), folder.path());
  EXPECT_LT(planned.results.micro_batch_size, 16);
  EXPECT_EQ(planned.results.num_recoveries, 0);
  EXPECT_LE(planned.results.peak_memory_bytes, floor - (floor / 10));
  EXPECT_LE(planned.results.peak_memory_bytes, planned.results.predicted_peak_bytes);
  EXPECT_LE(static_cast<double>(planned.results.predicted_peak_bytes),
            1.02 * static_cast<double>(planned.results.peak_memory_bytes));
  EXPECT_LE(largest_difference(planned.weights, whole.weights), 1e-5);
  EXPECT_GT(planned.results.recomputed_forward_fraction, 0.0) << "every stage ran twice";
}

TEST(ContrastiveTraining, KeepsTheLawInHalfPrecisionAndWithPrefetching) {
  set_log_quiet(true);
  const ScratchFolder folder("half");
  const RunCase run{"clip", std::string(kClip) + ",vision_dropout=0.1,text_dropout=0.1", 8, 3,
                    "adamw"};
  TrainingArguments arguments = arguments_of(run, 0, folder.path());
  arguments.bf16 = true;
  arguments.half_precision_backend = "keep";
  arguments.dataloader_num_workers = 1;
  const TrainResults kept = PreparedRun(run, arguments).trainer->train();
  arguments.gradient_checkpointing = "every";
  const TrainResults recomputed = PreparedRun(run, arguments).trainer->train();
  EXPECT_EQ(kept.weights_sha256, recomputed.weights_sha256);
  EXPECT_LE(recomputed.peak_memory_bytes, recomputed.predicted_peak_bytes);
}

TEST(ContrastiveTraining, AStepThatRunsOutOfMemoryIsMadeAgain) {
  set_log_quiet(true);
  const ScratchFolder folder("recovery");
  const RunCase run{"clip", kClip, 8, 2, "sgd"};
  const BudgetRange range = budget_range(run, folder.path());
  const TrainingArguments arguments = arguments_of(run, range.ample_bytes, folder.path());
  const TrainResults plain = train(run, range.ample_bytes, folder.path());
  const TrainResults lowered =
      PreparedRun(run, arguments, [&](auto data) -> std::shared_ptr<const Dataset> {
        return std::make_shared<CapLoweringData>(data, 11, range.floor_bytes);
      }).trainer->train();
  EXPECT_EQ(lowered.num_recoveries, 1);
  EXPECT_EQ(lowered.weights_sha256, plain.weights_sha256);
}

TEST(ContrastiveTraining, PagesABatchInOnePieceOrNotAtAll) {
  set_log_quiet(true);
  const ScratchFolder folder("paged");
  RunCase run{"clip", std::string(kClip) + ",text_dropout=0.1", 4, 2, "adamw", /*spills=*/true};
  const TrainResults parts = train(run, 0, folder.path());
  const std::int64_t statics = parts.num_parameters * 4 * 4;  // with gradients and AdamW's state
  EXPECT_THROW(train(run, statics - 1, folder.path()), BudgetError);
  run.micro_batch = 4;
  const TrainResults whole = train(run, 0, folder.path());
  const TrainResults paged = train(run, statics - 1, folder.path());
  EXPECT_EQ(paged.weights_sha256, whole.weights_sha256);
  EXPECT_NE(paged.weights_sha256, parts.weights_sha256);
}

class ComparedTraining : public ::testing::Test {
 protected:
  ComparedTraining() { set_log_quiet(true); }
  TrainResults train(const Chain& chain, std::int64_t micro_batch, std::int64_t eval_samples = 0) {
    TrainingArguments arguments = plain_arguments(folder_.path());
    arguments.global_batch_size = 8;
    arguments.per_device_train_batch_size = micro_batch;
    return Trainer(arguments, chain, make_data(),
                   eval_samples > 0 ? make_data(eval_samples) : nullptr)
        .train();
  }
  ScratchFolder folder_{"compared"};
};

TEST_F(ComparedTraining, TheLastPartialWindowIsComparedAsItIs) {
  const Chain whole = compared_chain(3), parts = compared_chain(3);
  const TrainResults one = train(whole, 8), many = train(parts, 3);
  EXPECT_EQ(many.global_step, one.global_step);
  EXPECT_NEAR(many.train_loss, one.train_loss, 1e-6);
  EXPECT_LE(largest_difference(parts.parameters(), whole.parameters()), 1e-5);
}

TEST_F(ComparedTraining, EvaluationComparesAGlobalBatchWhateverTheMicroBatch) {
  const TrainResults one = train(compared_chain(3), 8, 16), many = train(compared_chain(3), 2, 16);
  ASSERT_TRUE(one.eval && many.eval);
  EXPECT_NEAR(many.eval->loss, one.eval->loss, 1e-5);
  EXPECT_EQ(many.eval->num_samples, 16);
}

TEST_F(ComparedTraining, RefusesToSplitWhatWouldTrainAnotherLoss) {
  const auto message = [&](const Chain& chain) -> std::string {
    try {
      train(chain, 4);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message(compared_chain(3, 0.0, true)).find("BatchNorm"), std::string::npos);
  EXPECT_NE(message(compared_chain(3, 0.0, false, false)).find("--gradient_accumulation_steps"),
            std::string::npos);
  EXPECT_EQ(train(compared_chain(3, 0.0, true), 8).gradient_accumulation_steps, 1);
  EXPECT_EQ(train(compared_chain(3, 0.0, false, false), 8).gradient_accumulation_steps, 1);
}

}  // namespace
}  // namespace headroom
