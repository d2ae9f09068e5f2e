// Ranks that are started, stopped and ended by the program.
#include "apps/program.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModel =
    "n_layer=1,n_head=2,n_embd=16,block_size=8,vocab_size=32,dropout=0.2";

class StartedRanks : public ::testing::Test {
 protected:
  std::vector<std::string> train(const std::string& output, const std::string& max_steps,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"train",
                                      "--model",
                                      "gpt",
                                      "--model_config",
                                      kModel,
                                      "--global_batch_size",
                                      "12",
                                      "--disable_tqdm",
                                      "--ddp_timeout",
                                      "50",
                                      "--nproc_per_node",
                                      "2",
                                      "--max_steps",
                                      max_steps,
                                      "--logging_steps",
                                      "5",
                                      "--output_dir",
                                      folder_ / output};
    words.insert(words.end(), more.begin(), more.end());
    if (std::find(more.begin(), more.end(), "--dataset") == more.end())
      words.insert(words.end(), {"--dataset", "synthetic"});
    return words;
  }

  std::string hash_of(const std::string& output) const {
    return nlohmann::json::parse(
        read_file(folder_ / (output + "/train_results.json")))["weights_sha256"];
  }

  std::function<bool()> has_logged(const std::string& output) const {
    return [path = folder_ / (output + "/metrics.jsonl")] {
      return fs::exists(path) && fs::file_size(path) > 0;
    };
  }

  TemporaryFolder folder_;
};

TEST_F(StartedRanks, StopOnCtrlCWithASnapshotAndGoOnAsIfNothingHadHappened) {
  const Outcome whole = run_program(train("whole", "400"), folder_);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const Program program(train("cut", "400"), folder_);
  ASSERT_TRUE(program.interrupt_when(SIGINT, has_logged("cut")));
  const Outcome cut = program.wait();
  EXPECT_EQ(cut.exit_code, 130) << cut.err;
  EXPECT_NE(cut.err.find("--resume_from_checkpoint"), std::string::npos) << cut.err;
  const Outcome resumed =
      run_program(train("cut", "400", {"--resume_from_checkpoint", "last"}), folder_);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(hash_of("cut"), hash_of("whole"));
}

TEST_F(StartedRanks, OneThatIsKilledMakesSixOfAll) {
  const std::string output = folder_ / "killed";
  const Program program(train("killed", "1000000"), folder_);
  pid_t rank = -1;
  ASSERT_TRUE(program.interrupt_when(0, [&] {  // signal 0 only asks whether the program is there
    if (!has_logged("killed")()) return false;
    rank = rank_process(1, output);
    return rank > 0;
  }));
  ASSERT_EQ(::kill(rank, SIGKILL), 0);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.exit_code, 6) << outcome.err;
  EXPECT_NE(outcome.err.find("rank 1 of 2 was killed by signal 9"), std::string::npos)
      << outcome.err;
}

TEST_F(StartedRanks, FailTogetherWithTheCodeOfTheCause) {
  EXPECT_EQ(run_program(train("budget", "5", {"--memory_budget", "40KiB"}), folder_).exit_code, 4);
  EXPECT_EQ(run_program(train("data", "5", {"--dataset", folder_ / "nothing"}), folder_).exit_code,
            3);
  EXPECT_EQ(
      run_program(train("snapshot", "5", {"--resume_from_checkpoint", "last"}), folder_).exit_code,
      5);
}

TEST_F(StartedRanks, TrainATransformerInABudgetAndKeepToIt) {
  const std::vector<std::string> words = {
      "train",
      "--model",
      "gpt",
      "--model_config",
      "n_layer=4,n_head=2,n_embd=64,block_size=64,vocab_size=256",
      "--dataset",
      "synthetic",
      "--global_batch_size",
      "16",
      "--max_steps",
      "3",
      "--nproc_per_node",
      "2",
      "--memory_budget",
      "8MiB",
      "--disable_tqdm",
      "--output_dir",
      folder_ / "gpt"};
  const Outcome outcome = run_program(words, folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto results = nlohmann::json::parse(read_file(folder_ / "gpt/train_results.json"));
  EXPECT_LE(results["peak_memory_bytes"], results["memory_budget_bytes"]);
  EXPECT_EQ(results["peak_memory_bytes"], results["predicted_peak_bytes"]);
  EXPECT_EQ(results["num_recoveries"], 0);
}

}  // namespace
}  // namespace headroom::testing
