#include "train/snapshots.h"

#include <headroom/core/error.h>
#include <headroom/optim/optimizer.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class SnapshotsTest : public ::testing::Test {
 protected:
  SnapshotsTest() { set_log_quiet(true); }

  TrainingArguments arguments() const {
    TrainingArguments arguments = plain_arguments(folder_ / "out");
    arguments.save_steps = 4;
    return arguments;
  }

  TemporaryFolder folder_;
  RankGroup ranks_{nullptr};
  Chain chain_ = chain_of(make_noisy_network(5));
  std::unique_ptr<LeanOptimizer> optimizer_ =
      make_optimizer(OptimizerConfig(), chain_.named_parameters());
};

TEST_F(SnapshotsTest, AreDueAsOftenAsAsked) {
  const RunSettings settings(arguments(), 1);
  const Snapshots snapshots(settings, chain_, ranks_);
  EXPECT_TRUE(snapshots.are_due(8));
  EXPECT_FALSE(snapshots.are_due(9));
  const RunSettings never(plain_arguments(folder_ / "out"), 1);
  EXPECT_FALSE(Snapshots(never, chain_, ranks_).are_due(8));
}

TEST_F(SnapshotsTest, BringBackWeightsPositionAndRandomNumbers) {
  optimizer_->prepare_state();
  const RunSettings settings(arguments(), 1);
  const Snapshots snapshots(settings, chain_, ranks_);
  EXPECT_EQ(snapshots.source(), "");
  EXPECT_EQ(snapshots.position().global_step, 0);
  TrainingPosition position;
  position.global_step = 12;
  position.micro_batch = 3;
  const std::string sha = weights_sha256(chain_);
  const std::string saved = snapshots.save(position, *optimizer_);
  const double next = torch::rand({1}).item<double>();

  TrainingArguments resuming = arguments();
  resuming.resume_from_checkpoint = "last";
  const RunSettings resumed_settings(resuming, 1);
  const Chain other = chain_of(make_noisy_network(6));
  const auto other_optimizer = make_optimizer(OptimizerConfig(), other.named_parameters());
  const Snapshots resumed(resumed_settings, other, ranks_);
  EXPECT_EQ(resumed.source(), saved);
  EXPECT_EQ(resumed.position().micro_batch, 3);
  EXPECT_EQ(resumed.restore(*other_optimizer).global_step, 12);
  EXPECT_EQ(weights_sha256(other), sha);
  EXPECT_EQ(torch::rand({1}).item<double>(), next);
}

TEST_F(SnapshotsTest, OneThatCannotBeWrittenEndsNoTraining) {
  optimizer_->prepare_state();
  std::filesystem::create_directories(folder_ / "out");
  TrainingPosition position;
  position.global_step = 4;
  // Where the folder of a snapshot should be made there is a file.
  TrainingArguments blocked = arguments();
  blocked.output_dir = folder_ / "file";
  std::ofstream(blocked.output_dir) << "in the way";
  const RunSettings settings(blocked, 1);
  const Snapshots snapshots(settings, chain_, ranks_);
  EXPECT_THROW(snapshots.save(position, *optimizer_), SnapshotError);
  snapshots.save_or_warn(position, *optimizer_);
}

}  // namespace
}  // namespace headroom
