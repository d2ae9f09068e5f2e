// The law: a plan changes memory and time, never the numbers. And: the predicted peak is the
// measured peak.
#include "report/json.h"
#include "train/budget_runs.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

namespace headroom {
namespace {

constexpr int kNumBudgets = 12;

void expect_the_law(const RunCase& run) {
  set_log_quiet(true);
  const ScratchFolder folder("budgets");
  const BudgetRange range = budget_range(run, folder.path());
  // With several threads, the scratch memory of one convolution can be the peak of a small network
  // whatever is kept.
  if (run.model == "nin") {
    ASSERT_LE(range.floor_bytes, range.ample_bytes);
  } else {
    ASSERT_LT(range.floor_bytes, range.ample_bytes) << "the model must have something to trade";
  }
  const TrainResults plain = train(run, 0, folder.path());
  for (int i = 0; i < kNumBudgets; ++i) {
    const std::int64_t budget =
        range.floor_bytes + (range.ample_bytes - range.floor_bytes) * i / (kNumBudgets - 1);
    const TrainResults results = train(run, budget, folder.path());
    SCOPED_TRACE("budget " + std::to_string(budget) + ", predicted " +
                 std::to_string(results.predicted_peak_bytes) + ", measured " +
                 std::to_string(results.peak_memory_bytes));
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
    EXPECT_EQ(results.num_recoveries, 0);
    EXPECT_LE(results.peak_memory_bytes, budget);
    EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
    EXPECT_LE(static_cast<double>(results.predicted_peak_bytes),
              1.02 * static_cast<double>(results.peak_memory_bytes));
  }
}

class Budgets : public ::testing::TestWithParam<RunCase> {};

TEST_P(Budgets, EveryBudgetGivesTheSameNumbersAndThePredictedPeak) { expect_the_law(GetParam()); }

// Whatever the machine and the caller have: scratch memory and the order of sums depend on threads.
TEST(BudgetsOfTwoThreads, GiveTheSameNumbersAndThePredictedPeak) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  expect_the_law({"nin", "width=4,rows=14,columns=14", 8, 4, "sgd"});
  expect_the_law(
      {"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 4});
  at::set_num_threads(before);
}

TEST_P(Budgets, ThePredictedPeakSucceedsAsCapAndOneByteBelowTheFloorFailsBeforeTraining) {
  set_log_quiet(true);
  const RunCase run = GetParam();
  const ScratchFolder folder("floor");
  const BudgetRange range = budget_range(run, folder.path());
  const std::int64_t middle = (range.floor_bytes + range.ample_bytes) / 2;
  const std::int64_t predicted = train(run, middle, folder.path()).predicted_peak_bytes;
  EXPECT_NO_THROW(train(run, predicted, folder.path()));
  if (run.spills) return;  // below the floor, weights and their kind are paged: see paging_test
  try {
    train(run, range.floor_bytes - 1, folder.path());
    FAIL() << "a budget below the floor was accepted";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("floor"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Budgets,
    ::testing::Values(
        RunCase{"mlp", "hidden=64,layers=6", 32, 8, "adamw"},
        RunCase{"nin", "width=4,rows=14,columns=14", 8, 4, "sgd"},
        RunCase{"nin", "width=4,rows=14,columns=14", 8, 8, "adamw"},
        RunCase{"resnet", "blocks=40,width=4,rows=10,columns=10", 8, 4, "adamw"},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 4,
                "adamw"},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 8,
                "adafactor"},
        RunCase{"llama",
                "num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,hidden_size=32,"
                "intermediate_size=88,max_position_embeddings=32,vocab_size=64",
                8, 4, "adamw"},
        RunCase{"vit",
                "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=64,"
                "image_size=20,dropout=0.1",
                8, 4, "adamw"},
        RunCase{"bert",
                "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=128,"
                "max_position_embeddings=40,"
                "length=32,vocab_size=64,dropout=0.1",
                8, 4, "adamw"},
        RunCase{
            "clip",
            "vision_num_hidden_layers=2,vision_num_attention_heads=2,vision_hidden_size=32,vision_"
            "intermediate_size=64,"
            "text_num_hidden_layers=2,text_num_attention_heads=2,text_hidden_size=32,text_"
            "intermediate_size=128,image_"
            "size=20,length=16,vocab_size=40,projection_dim=16,vision_dropout=0.1,text_dropout=0.1",
            8, 8, "adamw"},
        RunCase{
            "clip",
            "vision_num_hidden_layers=2,vision_num_attention_heads=2,vision_hidden_size=32,vision_"
            "intermediate_size=64,"
            "text_num_hidden_layers=2,text_num_attention_heads=2,text_hidden_size=32,text_"
            "intermediate_size=128,image_"
            "size=20,length=16,vocab_size=40,projection_dim=16,vision_dropout=0.1,text_dropout=0.1",
            8, 2, "adamw"},
        RunCase{"mlp", "hidden=64,layers=6", 32, 8, "adamw", /*spills=*/true},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 4,
                "adamw",
                /*spills=*/true},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1", 8, 4,
                "adamw",
                /*spills=*/false, /*computes_in_half=*/true},
        RunCase{"llama",
                "num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,hidden_size=32,"
                "intermediate_size=88,max_position_embeddings=32,vocab_size=64",
                8, 4, "adamw", /*spills=*/true, /*computes_in_half=*/true},
        RunCase{"bert",
                "num_hidden_layers=4,num_attention_heads=2,hidden_size=32,intermediate_size=128,"
                "max_position_embeddings=40,"
                "length=32,vocab_size=64,dropout=0.1",
                8, 4, "adamw", /*spills=*/false, /*computes_in_half=*/true}),
    [](const auto& which) { return which.param.model + std::to_string(which.index); });

TEST(Spilling, ReplacesRecomputingWhereMemoryIsShortAndIsShownInThePlan) {
  set_log_quiet(true);
  const ScratchFolder folder("spilling");
  RunCase run{"gpt", "n_layer=12,n_head=2,n_embd=32,block_size=64,vocab_size=64,dropout=0.1", 16, 8,
              "sgd"};
  const std::int64_t budget = budget_range(run, folder.path()).floor_bytes;
  const TrainResults recomputed = train(run, budget, folder.path());
  run.spills = true;
  PreparedRun prepared(run, arguments_of(run, budget, folder.path()));
  const RunPlan plan = prepared.trainer->plan();
  EXPECT_NE(to_text(plan).find("spill"), std::string::npos) << to_text(plan);
  EXPECT_NE(to_json(plan).dump().find("\"format\": \"disk\""), std::string::npos);
  const TrainResults spilled = prepared.trainer->train();
  EXPECT_EQ(spilled.weights_sha256, recomputed.weights_sha256);
  EXPECT_EQ(spilled.num_recoveries, 0);
  EXPECT_LE(spilled.peak_memory_bytes, budget);
  // Without a place to spill to, each block is run again from the start for the backward of every
  // block after it.
  EXPECT_LT(spilled.recomputed_forward_fraction, 0.5 * recomputed.recomputed_forward_fraction);
}

TEST(Spilling, NeverHappensWithoutAFolder) {
  set_log_quiet(true);
  const ScratchFolder folder("no_spilling");
  const RunCase run{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64", 8, 8, "sgd"};
  PreparedRun prepared(
      run, arguments_of(run, budget_range(run, folder.path()).floor_bytes, folder.path()));
  const RunPlan plan = prepared.trainer->plan();
  EXPECT_TRUE(plan.costs.boundary_formats.empty());
  for (const Operation& operation : plan.batch.largest().schedule.operations)
    EXPECT_EQ(operation.format, 0);
}

TEST(UpdateInBackward, ServesABudgetThatNothingElseDoesWithTheSameWeights) {
  set_log_quiet(true);
  for (const RunCase& run :
       {RunCase{"mlp", "hidden=128,layers=8", 4, 4, "adamw"},
        RunCase{"gpt", "n_layer=4,n_head=2,n_embd=64,block_size=16,vocab_size=64", 2, 2,
                "adamw"}}) {
    const ScratchFolder folder("in_backward");
    TrainingArguments arguments = arguments_of(run, 0, folder.path());
    arguments.max_grad_norm = 0.0;
    const TrainResults plain = PreparedRun(run, arguments).trainer->train();
    const std::int64_t gradients = plain.peak_bytes_by_owner.at("gradients");
    // Weights, optimizer and gradients alone are more than this.
    arguments.memory_budget_bytes = plain.num_parameters * 4 * 3 + gradients * 3 / 4;
    PreparedRun prepared(run, arguments);
    EXPECT_TRUE(prepared.trainer->plan().updates_in_backward());
    const TrainResults results = prepared.trainer->train();
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256) << run.model;
    EXPECT_LE(results.peak_memory_bytes, arguments.memory_budget_bytes);
    EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
    arguments.max_grad_norm = 1.0;  // clipping needs all gradients at once
    EXPECT_THROW(PreparedRun(run, arguments).trainer->train(), BudgetError);
  }
}

TEST(Splits, DifferentSplitsAgreeUpToTheOrderOfSums) {
  set_log_quiet(true);
  const ScratchFolder folder("splits");
  const double whole =
      train({"mlp", "hidden=64,layers=3", 24, 24, "sgd"}, 0, folder.path()).final_loss;
  for (const std::int64_t micro : {1, 5, 7, 12}) {
    const double loss =
        train({"mlp", "hidden=64,layers=3", 24, micro, "sgd"}, 0, folder.path()).final_loss;
    EXPECT_NEAR(loss, whole, 1e-5 * std::abs(whole)) << "micro-batches of " << micro;
  }
}

TEST(Splits, TheSearchStaysInsideTheBudgetAndKeepsTheGlobalBatch) {
  set_log_quiet(true);
  const ScratchFolder folder("search");
  const RunCase run{"mlp", "hidden=64,layers=6", 32, 0, "adamw"};
  const TrainResults plain = train(run, 0, folder.path());
  EXPECT_EQ(plain.micro_batch_size, 32);
  const std::int64_t floor =
      budget_range({"mlp", "hidden=64,layers=6", 32, 1, "adamw"}, folder.path()).floor_bytes;
  for (const std::int64_t budget : {floor, (floor + plain.peak_memory_bytes) / 2}) {
    const TrainResults results = train(run, budget, folder.path());
    EXPECT_LE(results.peak_memory_bytes, budget);
    EXPECT_EQ(results.global_step, plain.global_step);
    EXPECT_GE(results.micro_batch_size * results.gradient_accumulation_steps, 32);
    EXPECT_NEAR(results.final_loss, plain.final_loss, 1e-5 * plain.final_loss);
  }
}

}  // namespace
}  // namespace headroom
