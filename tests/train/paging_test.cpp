// The law for models larger than memory: whatever is paged, the numbers are those of a run in
// memory, and the predicted peak is the measured peak.
#include "memory/spill_store.h"
#include "report/json.h"
#include "train/paged_runs.h"

#include <headroom/core/error.h>
#include <headroom/train/estimate.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

namespace headroom {
namespace {

namespace fs = std::filesystem;

class Paging : public ::testing::TestWithParam<PagedCase> {};

TEST_P(Paging, EveryBudgetGivesTheSameNumbersAndThePredictedPeak) {
  set_log_quiet(true);
  const PagedCase test = GetParam();
  // Updates are counted with scalars that operators make of numbers; not every optimizer has any.
  constexpr std::int64_t kScalarBytes = 64;
  const ScratchFolder folder("paging");
  const TrainResults plain = train(test, 0, folder.path());
  const std::int64_t floor = paged_floor_of(test, folder.path());
  ASSERT_LT(floor, plain.peak_memory_bytes / 2) << "most of the model must be able to leave";
  for (int i = 0; i < test.num_budgets; ++i) {
    const std::int64_t budget =
        floor + (plain.peak_memory_bytes - floor) * i / (test.num_budgets - 1);
    const TrainResults results = train(test, budget, folder.path());
    SCOPED_TRACE("budget " + std::to_string(budget) + ", predicted " +
                 std::to_string(results.predicted_peak_bytes) + ", measured " +
                 std::to_string(results.peak_memory_bytes));
    EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
    EXPECT_EQ(results.final_loss, plain.final_loss);
    EXPECT_EQ(results.num_skipped_updates, plain.num_skipped_updates);
    EXPECT_EQ(results.num_recoveries, 0);
    EXPECT_LE(results.peak_memory_bytes, budget);
    EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
    EXPECT_LE(results.predicted_peak_bytes, results.peak_memory_bytes + kScalarBytes);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Paging,
    ::testing::Values(
        PagedCase{{"gpt", kPagedGpt, 8, 4, "adamw"}},
        PagedCase{{"gpt", kPagedGpt, 8, 4, "adamw"}, 0.0},
        PagedCase{{"gpt", kPagedGpt, 8, 1, "adamw"}, 1.0, false, 4},
        PagedCase{{"gpt", kPagedGpt, 8, 8, "sgd"}, 0.0, false, 4},
        PagedCase{{"gpt", kPagedGpt, 8, 8, "adafactor"}, 0.0, false, 4},
        PagedCase{{"gpt", kPagedGpt, 8, 4, "adamw_8bit"}, 0.01, false, 4},
        PagedCase{{"gpt", kPagedGpt, 8, 4, "adam"}, 1.0, /*fp16=*/true, 4},
        PagedCase{{"bert",
                   "num_hidden_layers=4,num_attention_heads=2,hidden_size=64,intermediate_size=256,"
                   "max_position_embeddings=24,length=16,vocab_size=256,dropout=0.1",
                   8, 4, "adamw"}},
        PagedCase{{"resnet", "blocks=8,width=16,rows=6,columns=6", 8, 4, "sgd"}},
        PagedCase{{"mlp", "hidden=256,layers=8", 8, 2, "adamw"}}),
    [](const auto& which) {
      return which.param.run.model + "_" + which.param.run.optim + std::to_string(which.index);
    });

TEST(PagedPlans, SayWhatIsInMemoryAndWhatAnUpdateMoves) {
  set_log_quiet(true);
  const ScratchFolder folder("paged_plan");
  const PagedCase test{{"gpt", kPagedGpt, 8, 4, "adamw"}};
  const std::int64_t budget = middle_budget(test, folder.path());
  const RunPlan plan =
      PreparedRun(test.run, arguments_of(test, budget, folder.path())).trainer->plan();
  ASSERT_TRUE(plan.paging.is_active());
  EXPECT_GT(plan.paging.bytes_read, 0);
  EXPECT_GT(plan.paging.bytes_written, 0);
  EXPECT_GE(plan.predicted_step_seconds, 1e-9 * static_cast<double>(plan.paging.wait_ns));
  EXPECT_NE(to_text(plan).find("paged:"), std::string::npos) << to_text(plan);
  EXPECT_NE(to_json(plan).dump().find("bytes_read_per_update"), std::string::npos);
}

// With clipping a unit waits for the next forward, without it for nothing.
TEST(PagedPlans, UpdateWhereTheDiskCanHide) {
  set_log_quiet(true);
  const ScratchFolder folder("paged_update_time");
  for (const double max_grad_norm : {1.0, 0.0}) {
    const PagedCase test{{"gpt", kPagedGpt, 8, 4, "adamw"}, max_grad_norm};
    const std::int64_t budget = middle_budget(test, folder.path());
    const RunPlan plan =
        PreparedRun(test.run, arguments_of(test, budget, folder.path())).trainer->plan();
    EXPECT_TRUE(plan.paging.updates !=
                (max_grad_norm > 0 ? UpdateTime::kInBackward : UpdateTime::kInNextForward));
  }
}

TEST(PagedPlans, AnEstimateTellsTheFloorThatARunThenMeets) {
  set_log_quiet(true);
  const ScratchFolder folder("paged_estimate");
  const PagedCase test{{"gpt", kPagedGpt, 8, 4, "adamw"}};
  TrainingArguments arguments = arguments_of(test, 0, folder.path());
  arguments.spill_dir = folder.path();
  const Estimate result = estimate(arguments);
  ASSERT_EQ(result.paged_floor.name, "paged plan");
  EXPECT_LT(result.paged_floor.peak_bytes, result.floor.peak_bytes / 2);
  EXPECT_GT(result.paged_bytes_read, result.weights_bytes);
  EXPECT_GT(result.paged_bytes_written, result.weights_bytes);
  const TrainResults results = train(test, result.paged_floor.peak_bytes, folder.path());
  EXPECT_LE(results.peak_memory_bytes, result.paged_floor.peak_bytes);
  arguments.memory_budget_bytes = result.paged_floor.peak_bytes;
  EXPECT_EQ(estimate(arguments).strategies.back().name, "paged plan");
}

TEST(PagedPlans, WithoutAFolderTheErrorOffersIt) {
  set_log_quiet(true);
  const ScratchFolder folder("no_folder");
  const PagedCase test{{"gpt", kPagedGpt, 8, 4, "adamw"}};
  TrainingArguments arguments =
      arguments_of(test, middle_budget(test, folder.path()), folder.path());
  arguments.spill_dir.clear();
  try {
    PreparedRun(test.run, arguments).trainer->train();
    FAIL() << "the budget does not hold the weights";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("--spill_dir"), std::string::npos) << error.what();
  }
}

TEST(PagedRuns, ResumeAndEvaluateAsIfNothingHadHappened) {
  set_log_quiet(true);
  const ScratchFolder folder("paged_resume"), whole("paged_whole");
  const PagedCase test{{"gpt", kPagedGpt, 8, 4, "adamw"}};
  const std::int64_t budget = middle_budget(test, whole.path());
  TrainingArguments arguments = arguments_of(test, budget, folder.path());
  arguments.save_steps = 2;
  const TrainResults paged = PreparedRun(test.run, arguments).trainer->train();
  // With and without pages from here on: a snapshot does not know of them.
  for (const std::int64_t later : {budget, std::int64_t{0}}) {
    TrainingArguments resumed = arguments_of(test, later, whole.path());
    resumed.resume_from_checkpoint = folder.path() + "/snapshot-2";
    PreparedRun run(test.run, resumed);
    EXPECT_EQ(run.trainer->train().weights_sha256, paged.weights_sha256) << later;
  }
  EXPECT_TRUE(fs::exists(folder.path() + "/model.safetensors"));
}

// Disks fail when they want.
TEST(PagedRuns, AFailedTransferIsTheDocumentedErrorAndTheLastSnapshotContinues) {
  set_log_quiet(true);
  const ScratchFolder folder("paged_faults"), undisturbed_folder("paged_no_faults");
  const PagedCase test{{"mlp", "hidden=128,layers=4", 8, 4, "adamw"}};
  const std::int64_t budget = middle_budget(test, undisturbed_folder.path());
  const TrainResults undisturbed = train(test, budget, undisturbed_folder.path());
  // False when there are no more transfers than that.
  const auto train_failing_at = [&](int place) {
    fs::remove_all(folder.path());
    TrainingArguments arguments = arguments_of(test, budget, folder.path());
    arguments.save_steps = 1;
    PreparedRun run(test.run, arguments);
    int transfer = 0;
    const TransferFaultScope fault([&](TransferKind kind, const Extent&) {
      if (++transfer < place) return 0;
      return kind == TransferKind::kRead ? EIO : ENOSPC;
    });
    try {
      run.trainer->train();
      return false;
    } catch (const BudgetError&) {
      return true;
    } catch (const DataError&) {
      return true;
    }
  };
  int num_failed = 0;
  for (int place = 20; train_failing_at(place); place += 61) {
    ++num_failed;
    for (const auto& entry : fs::directory_iterator(folder.path()))
      EXPECT_EQ(entry.path().string().find("spill"), std::string::npos) << entry.path();
    TrainingArguments again = arguments_of(test, budget, folder.path());
    if (fs::exists(folder.path() + "/snapshot-1")) again.resume_from_checkpoint = "last";
    EXPECT_EQ(PreparedRun(test.run, again).trainer->train().weights_sha256,
              undisturbed.weights_sha256)
        << "after a fault at transfer " << place;
  }
  EXPECT_GE(num_failed, 5);
}

}  // namespace
}  // namespace headroom
