// Memory runs out in the middle of a step all the same: the step is undone, planned anew and made
// again, and nothing is lost.
#include "train/budget_runs.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <random>

namespace headroom {
namespace {

TEST(Recovery, ACapLoweredAtAnyMicroBatchGivesTheSameWeights) {
  set_log_quiet(true);
  const RunCase run{"resnet", "blocks=20,width=4,rows=10,columns=10,norm=0", 8, 4, "adamw"};
  const ScratchFolder folder("recovery");
  const BudgetRange range = budget_range(run, folder.path());
  const TrainResults plain = train(run, 0, folder.path());
  const std::int64_t low = range.floor_bytes + (range.ample_bytes - range.floor_bytes) / 5;
  int num_recovered = 0;
  for (int at = 0; at < 10; ++at) {
    const std::int64_t live_before = MemoryMeter::instance().live_bytes();
    {
      TrainingArguments arguments = arguments_of(run, range.ample_bytes, folder.path());
      PreparedRun prepared(run, arguments, [&](auto data) {
        return std::make_shared<CapLoweringData>(data, at + 1, low);
      });
      const TrainResults results = prepared.trainer->train();
      EXPECT_EQ(results.weights_sha256, plain.weights_sha256) << "cap lowered at load " << at;
      EXPECT_EQ(results.global_step, plain.global_step);
      num_recovered += results.num_recoveries > 0 ? 1 : 0;
    }
    EXPECT_EQ(MemoryMeter::instance().live_bytes(), live_before) << "a leak";
  }
  EXPECT_GE(num_recovered, 8);
}

TEST(Recovery, BelowTheFloorIsABudgetErrorAndTheLastGoodStateIsSaved) {
  set_log_quiet(true);
  const RunCase run{"mlp", "hidden=64,layers=6", 8, 4, "adamw"};
  const ScratchFolder folder("below");
  const BudgetRange range = budget_range(run, folder.path());
  TrainingArguments arguments = arguments_of(run, range.ample_bytes, folder.path());
  PreparedRun prepared(run, arguments,
                       [&](auto data) { return std::make_shared<CapLoweringData>(data, 5, 1); });
  try {
    prepared.trainer->train();
    FAIL() << "trained without memory";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("snapshot-"), std::string::npos) << error.what();
  }
  MemoryMeter::instance().set_cap(0);
  bool found = false;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    found = found || entry.path().filename().string().rfind("snapshot-", 0) == 0;
  }
  EXPECT_TRUE(found) << "no snapshot of the last good state";
}

}  // namespace
}  // namespace headroom
