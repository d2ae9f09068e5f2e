// "Will it fit?": what is estimated without running is what training then measures.
#include "train/budget_runs.h"

#include <headroom/core/error.h>
#include <headroom/train/estimate.h>
#include "core/log.h"
#include "memory/shape_meter.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

class Estimates : public ::testing::TestWithParam<RunCase> {};

void expect_peak(const EstimatedStrategy& strategy, std::int64_t measured) {
  EXPECT_GE(strategy.peak_bytes, measured) << strategy.policy;
  EXPECT_LE(static_cast<double>(strategy.peak_bytes), 1.02 * static_cast<double>(measured))
      << strategy.policy;
}

TEST_P(Estimates, AreThePeaksThatTrainingMeasures) {
  set_log_quiet(true);
  RunCase run = GetParam();
  const ScratchFolder folder("estimate");
  for (const std::int64_t micro : {1, 2, 4, 8}) {
    run.micro_batch = micro;
    SCOPED_TRACE(run.model + " in micro-batches of " + std::to_string(micro));
    TrainingArguments arguments = arguments_of(run, 0, folder.path());
    arguments.max_steps = 2;
    const Estimate result = estimate(arguments);
    ASSERT_EQ(result.policies.size(), 4U);
    for (const EstimatedStrategy& strategy : result.policies) {
      arguments.gradient_checkpointing =
          strategy.policy == "optimal" || strategy.policy == "none" ? "" : strategy.policy;
      arguments.memory_budget_bytes = strategy.policy == "optimal" ? strategy.peak_bytes : 0;
      expect_peak(strategy, PreparedRun(run, arguments).trainer->train().peak_memory_bytes);
    }
  }
}

TEST_P(Estimates, SayWhatFitsAndWhatDoesNot) {
  set_log_quiet(true);
  const RunCase run = GetParam();
  const ScratchFolder folder("fits");
  TrainingArguments arguments = arguments_of(run, 0, folder.path());
  const Estimate without_budget = estimate(arguments);
  EXPECT_TRUE(without_budget.strategies.empty());
  arguments.memory_budget_bytes = without_budget.floor.peak_bytes - 1;
  EXPECT_FALSE(estimate(arguments).fits());
  arguments.memory_budget_bytes = without_budget.floor.peak_bytes;
  const Estimate at_floor = estimate(arguments);
  ASSERT_TRUE(at_floor.fits());
  for (const std::int64_t budget :
       {at_floor.floor.peak_bytes,
        (at_floor.floor.peak_bytes + without_budget.policies.front().peak_bytes) / 2}) {
    arguments.memory_budget_bytes = budget;
    for (const EstimatedStrategy& strategy : estimate(arguments).strategies) {
      SCOPED_TRACE(strategy.name + " " + strategy.policy);
      EXPECT_LE(strategy.peak_bytes, budget);
      TrainingArguments chosen = arguments;
      chosen.max_steps = 1;
      chosen.gradient_checkpointing =
          strategy.policy == "optimal" || strategy.policy == "none" ? "" : strategy.policy;
      if (strategy.policy != "optimal") {
        chosen.per_device_train_batch_size = strategy.micro_batch;
        chosen.memory_budget_bytes = 0;
      }
      EXPECT_LE(PreparedRun(run, chosen).trainer->train().peak_memory_bytes, budget);
    }
  }
  arguments.memory_budget_bytes = std::int64_t{1} << 40;
  EXPECT_EQ(estimate(arguments).strategies.front().name, "plain");
}

INSTANTIATE_TEST_SUITE_P(
    Models, Estimates,
    ::testing::Values(
        RunCase{"mlp", "hidden=64,layers=6", 8, 0, "adamw"},
        RunCase{"nin", "width=4,rows=14,columns=14", 8, 0, "sgd"},
        RunCase{"resnet", "blocks=12,width=4,rows=10,columns=10", 8, 0, "adamw"},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 0,
                "adafactor"},
        RunCase{"llama",
                "num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,hidden_size=32,"
                "intermediate_size=88,max_position_embeddings=32,vocab_size=64",
                8, 0, "adamw"},
        RunCase{"vit",
                "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=64,"
                "image_size=20,dropout=0.1",
                8, 0, "adamw"},
        RunCase{"bert",
                "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=128,"
                "max_position_embeddings=40,"
                "length=32,vocab_size=64,dropout=0.1",
                8, 0, "adamw"}),
    [](const auto& which) { return which.param.model; });

TEST(Estimate, OfSeveralRanksIsThatOfTheShareOfOne) {
  TrainingArguments arguments;
  arguments.model = "mlp";
  arguments.global_batch_size = 64;
  const Estimate one = estimate(arguments);
  arguments.global_batch_size = 127;
  arguments.nproc_per_node = 2;
  const Estimate two = estimate(arguments);
  EXPECT_EQ(two.num_ranks, 2);
  EXPECT_EQ(two.global_batch, 127);
  ASSERT_EQ(two.policies.size(), one.policies.size());
  for (std::size_t i = 0; i < two.policies.size(); ++i) {
    EXPECT_EQ(two.policies[i].micro_batch, one.policies[i].micro_batch);
    EXPECT_EQ(two.policies[i].activation_bytes, one.policies[i].activation_bytes);
    EXPECT_GE(two.policies[i].peak_bytes, one.policies[i].peak_bytes);
    EXPECT_LE(two.policies[i].peak_bytes, one.policies[i].peak_bytes + (std::int64_t{1} << 20))
        << "and what summing gradients takes";
  }
}

TEST(Estimate, OfABatchWhoseSamplesAreComparedCountsTheEmbeddings) {
  TrainingArguments arguments;
  arguments.model = "clip";
  arguments.global_batch_size = 16;
  arguments.per_device_train_batch_size = 0;
  const Estimate whole = estimate(arguments);
  EXPECT_LT(whole.floor.micro_batch, 16);
  arguments.per_device_train_batch_size = 4;
  const Estimate parts = estimate(arguments);
  EXPECT_EQ(parts.policies.front().num_micro_batches, 4);
  EXPECT_LT(parts.policies.front().peak_bytes, whole.policies.front().peak_bytes);
  arguments.global_batch_size = 4096;
  EXPECT_GT(estimate(arguments).policies.front().peak_bytes,
            parts.policies.front().peak_bytes + 4096 * 4096 * 4)
      << "all samples by all samples";
}

TEST(Estimate, OfALargeModelTakesNoMemory) {
  MemoryMeter& meter = MemoryMeter::instance();
  meter.reset_peak();
  const std::int64_t live = meter.live_bytes(), shapes = ShapeMeter::instance().live_bytes(),
                     resident = peak_resident_bytes();
  TrainingArguments arguments;
  arguments.model = "gpt2-xl";
  arguments.memory_budget_bytes = std::int64_t{64} << 30;
  const Estimate result = estimate(arguments);
  EXPECT_EQ(result.num_parameters, 1'557'611'200);
  EXPECT_EQ(result.weights_bytes, 4 * result.num_parameters);
  EXPECT_TRUE(result.fits());
  EXPECT_LT(meter.peak_bytes() - live, std::int64_t{1} << 20);
  EXPECT_LT(peak_resident_bytes() - resident, std::int64_t{600} << 20);
  EXPECT_EQ(ShapeMeter::instance().live_bytes(), shapes);
}

}  // namespace
}  // namespace headroom
