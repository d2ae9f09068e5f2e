// Samples whose length varies: each bucket of shapes has its own plan, made before it is needed.
#include "train/shape_bucket.h"
#include "train/budget_runs.h"
#include "train/varying_tokens.h"

#include "core/log.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

namespace headroom {
namespace {

constexpr std::int64_t kLongest = 64;
const RunCase kRun{"gpt", "n_layer=4,n_head=2,n_embd=32,block_size=64,vocab_size=64,dropout=0.1", 8,
                   0, "adamw"};

// The lengths of the windows of a run, in order.
const std::vector<std::int64_t> kWindows = {24, 16, 64, 23, 40, 64, 17, 33, 58, 24, 18, 64};

std::int64_t length_by_window(std::int64_t sample) {
  return kWindows[static_cast<std::size_t>(sample / kRun.global_batch) % kWindows.size()];
}

TrainingArguments arguments_for(const RunCase& run, std::int64_t budget_bytes,
                                const std::string& folder) {
  TrainingArguments arguments = arguments_of(run, budget_bytes, folder);
  arguments.shuffle = false;
  arguments.max_steps = static_cast<std::int64_t>(kWindows.size());
  return arguments;
}

TrainResults train_varying(const RunCase& run, const TrainingArguments& arguments,
                           const VaryingTokens::Length& length) {
  return PreparedRun(run, arguments,
                     [&](auto data) { return std::make_shared<VaryingTokens>(data, length); })
      .trainer->train();
}

// Each shape that is the first of its bucket, or larger than all before in it.
std::int64_t num_plans_expected() {
  std::map<std::string, std::int64_t> largest;
  std::int64_t count = 0;
  for (const std::int64_t length : kWindows) {
    std::int64_t& seen = largest[bucket_key({{length}})];
    count += length > seen ? 1 : 0;
    seen = std::max(seen, length);
  }
  return count;
}

// The least budget in which a micro-batch of the longest samples fits.
std::int64_t tight_budget(const RunCase& run, std::int64_t micro_batch, const std::string& folder) {
  RunCase fixed = run;
  fixed.micro_batch = micro_batch;
  return budget_range(fixed, folder).floor_bytes;
}

TEST(ShapeBuckets, RoundUpByAtMostAQuarter) {
  std::set<std::string> keys;
  for (std::int64_t size = 1; size <= 1024; ++size) {
    const std::string key = bucket_key({{size}});
    const std::int64_t bound = std::stoll(key);
    EXPECT_GE(bound, size);
    EXPECT_LE(bound, size + (size - 1) / 4) << size;
    EXPECT_EQ(bucket_key({{bound}}), key);
    keys.insert(key);
  }
  EXPECT_EQ(keys.size(), 36U);  // 1 to 4, then four for each doubling
}

TEST(ShapeBuckets, AMicroBatchTakesAnyShapeWithValuesOfItsOwn) {
  const MicroBatch micro{{torch::arange(6).reshape({2, 3})}, {torch::arange(2)}, 2, 2};
  const Shapes shapes = {{5}, {}};
  const MicroBatch longer = with_shapes(micro, shapes);
  EXPECT_EQ(shapes_of(longer), shapes);
  EXPECT_TRUE(torch::equal(longer.inputs[0][1], torch::tensor({3, 4, 5, 5, 5})));
  EXPECT_TRUE(torch::equal(with_shapes(longer, shapes_of(micro)).inputs[0], micro.inputs[0]));
  EXPECT_TRUE(covers(shapes, shapes_of(micro)));
  EXPECT_FALSE(covers(shapes_of(micro), shapes));
  EXPECT_EQ(merged({{2, 9}}, {{5, 3}}), (Shapes{{5, 9}}));
}

TEST(ShapeBuckets, EachHasAPlanOfItsOwnAndNothingRunsOut) {
  set_log_quiet(true);
  const ScratchFolder folder("buckets");
  RunCase run = kRun;
  run.micro_batch = 4;
  const std::int64_t budget = tight_budget(run, run.micro_batch, folder.path());
  const TrainResults plain =
      train_varying(run, arguments_for(run, 0, folder.path()), length_by_window);
  ASSERT_GT(plain.peak_memory_bytes, budget) << "the budget must be tight";
  const TrainResults results =
      train_varying(run, arguments_for(run, budget, folder.path()), length_by_window);
  EXPECT_EQ(results.num_recoveries, 0);
  EXPECT_EQ(results.num_plans, num_plans_expected());
  EXPECT_EQ(results.global_step, plain.global_step);
  EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
  EXPECT_LE(results.peak_memory_bytes, budget);
  EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
  EXPECT_LE(static_cast<double>(results.predicted_peak_bytes),
            1.02 * static_cast<double>(results.peak_memory_bytes));
}

// Planning measures, which starts the count of memory anew.
TEST(ShapeBuckets, ThePeakOfARunIsNotForgottenWhereALaterBucketIsSmaller) {
  set_log_quiet(true);
  const ScratchFolder folder("bucket_peak");
  RunCase run = kRun;
  run.micro_batch = 4;
  TrainingArguments arguments =
      arguments_for(run, tight_budget(run, run.micro_batch, folder.path()), folder.path());
  arguments.max_steps = 2;
  const TrainResults results = train_varying(run, arguments, [](std::int64_t sample) {
    return sample < kRun.global_batch ? kLongest : kLongest / 4;
  });
  EXPECT_EQ(results.num_plans, 2);
  EXPECT_LE(static_cast<double>(results.predicted_peak_bytes),
            1.02 * static_cast<double>(results.peak_memory_bytes));
}

TEST(ShapeBuckets, MaySplitTheGlobalBatchInTheirOwnWay) {
  set_log_quiet(true);
  const ScratchFolder folder("bucket_splits");
  RunCase run = kRun;
  run.config =
      "n_layer=4,n_head=2,n_embd=32,block_size=64,vocab_size=64";  // dropout draws other numbers
                                                                   // for another split
  const std::int64_t budget = tight_budget(run, 2, folder.path());
  const TrainResults plain =
      train_varying(run, arguments_for(run, 0, folder.path()), length_by_window);
  const TrainResults results =
      train_varying(run, arguments_for(run, budget, folder.path()), length_by_window);
  EXPECT_EQ(results.num_recoveries, 0);
  EXPECT_LE(results.peak_memory_bytes, budget);
  EXPECT_NEAR(results.final_loss, plain.final_loss, 1e-5 * plain.final_loss);
  std::set<std::string> plans;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("plan-", 0) == 0) plans.insert(name);
  }
  EXPECT_TRUE(plans.count("plan-64_64.json") != 0);
}

TEST(ShapeBuckets, AWindowWhoseLaterMicroBatchesAreLongerIsMadeAgainAsAWhole) {
  set_log_quiet(true);
  const ScratchFolder folder("bucket_inside");
  RunCase run = kRun;
  run.micro_batch = 2;
  const auto by_sample = [](std::int64_t sample) { return 16 + sample * 7 % 49; };
  const std::int64_t budget = tight_budget(run, run.micro_batch, folder.path());
  const TrainResults plain = train_varying(run, arguments_for(run, 0, folder.path()), by_sample);
  const TrainResults results =
      train_varying(run, arguments_for(run, budget, folder.path()), by_sample);
  EXPECT_EQ(results.num_recoveries, 0);
  EXPECT_EQ(results.weights_sha256, plain.weights_sha256);
  EXPECT_LE(results.peak_memory_bytes, budget);
}

TEST(ShapeBuckets, AreSplitAsBeforeWhenARunIsResumed) {
  set_log_quiet(true);
  // A bucket that first needs a smaller split after the snapshot is split by what is measured then.
  const auto without_growth = [](std::int64_t sample) {
    return length_by_window(sample) == 18 ? 17 : length_by_window(sample);
  };
  const ScratchFolder whole_folder("bucket_whole"), folder("bucket_resumed");
  const std::int64_t budget = tight_budget(kRun, 3, folder.path());
  TrainingArguments arguments = arguments_for(kRun, budget, whole_folder.path());
  arguments.save_steps = 7;
  const TrainResults whole = train_varying(kRun, arguments, without_growth);
  arguments.resume_from_checkpoint = whole_folder.path() + "/snapshot-7";
  arguments.output_dir = folder.path();
  const TrainResults resumed = train_varying(kRun, arguments, without_growth);
  EXPECT_EQ(resumed.global_step, whole.global_step);
  EXPECT_EQ(resumed.weights_sha256, whole.weights_sha256);
}

TEST(ShapeBuckets, OneShapeHasOnePlan) {
  set_log_quiet(true);
  const ScratchFolder folder("bucket_one");
  const std::int64_t budget = tight_budget(kRun, 4, folder.path());
  const TrainResults results = train_varying(kRun, arguments_for(kRun, budget, folder.path()),
                                             [](std::int64_t) { return kLongest; });
  EXPECT_EQ(results.num_plans, 1);
}

}  // namespace
}  // namespace headroom
