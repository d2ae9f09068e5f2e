// A run and its output folder: it has it alone, resumes only on the data it was trained on, and
// does without what is merely convenient.
#include "train/run_lock.h"
#include "train/training_support.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

TEST(RunFolder, BelongsToOneRunAtATime) {
  const TemporaryFolder folder;
  const auto data = make_data();
  int num_refused = 0;
  data->on_load = [&](c10::ArrayRef<std::int64_t>) {
    try {
      const RunLock second(folder / "out");
    } catch (const ConfigError&) {
      ++num_refused;
    }
  };
  TrainingArguments arguments = plain_arguments(folder / "out");
  arguments.max_steps = 2;
  Trainer(arguments, chain_of(make_plain_network(5)), data).train();
  EXPECT_GE(num_refused, 2);
  EXPECT_FALSE(fs::exists(folder / "out/.run.lock"));
  const RunLock free(folder / "out");
}

TEST(RunFolder, DataExchangedUnderTheSameNameIsNoticed) {
  const TemporaryFolder folder;
  write_plain(folder / "data.txt", "some text");
  TrainingArguments arguments = plain_arguments(folder / "out");
  arguments.dataset = folder / "data.txt";
  arguments.max_steps = 2;
  arguments.save_steps = 1;
  Trainer(arguments, chain_of(make_plain_network(5)), make_data()).train();
  arguments.resume_from_checkpoint = folder / "out/snapshot-1";
  write_plain(folder / "data.txt", "some test");
  try {
    Trainer(arguments, chain_of(make_plain_network(5)), make_data()).train();
    ADD_FAILURE() << "resumed on other data";
  } catch (const SnapshotError& error) {
    EXPECT_NE(std::string(error.what()).find("contents of the dataset"), std::string::npos)
        << error.what();
  }
  write_plain(folder / "data.txt", "some text");
  EXPECT_EQ(Trainer(arguments, chain_of(make_plain_network(5)), make_data()).train().global_step,
            2);
}

TEST(RunFolder, AProfileThatCannotBeCachedIsNoError) {
  set_log_quiet(true);
  const TemporaryFolder folder;
  fs::create_directories(folder / "out");
  write_plain(folder / "out/profile", "in the way");
  TrainingArguments arguments = plain_arguments(folder / "out");
  arguments.max_steps = 1;
  arguments.memory_budget_bytes = std::int64_t{64} << 20;
  EXPECT_EQ(Trainer(arguments, chain_of(make_plain_network(5)), make_data()).train().global_step,
            1);
  EXPECT_EQ(read_file(folder / "out/profile"), "in the way");
}

}  // namespace
}  // namespace headroom::testing
