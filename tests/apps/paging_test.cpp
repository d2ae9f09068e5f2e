// Models that are larger than their budget, from the command line: made, trained, saved and resumed
// without ever being in memory as a whole.
#include "apps/program.h"
#include "support/sanitizer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

class PagedCommandsTest : public ::testing::Test {
 protected:
  PagedCommandsTest() { fs::create_directories(folder_ / "disk"); }

  // 36 MiB of weights, 145 MiB with gradients and AdamW's state.
  static std::vector<std::string> with_model(const std::string& command,
                                             const std::vector<std::string>& more) {
    std::vector<std::string> words = {
        command,
        "--model",
        "gpt",
        "--model_config",
        "n_layer=12,n_head=4,n_embd=256,block_size=32,vocab_size=512,dropout=0.1",
        "--dataset",
        "synthetic",
        "--global_batch_size",
        "4",
        "--per_device_train_batch_size",
        "2",
        "--learning_rate",
        "1e-3"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  std::vector<std::string> train(const std::string& output,
                                 const std::vector<std::string>& more) const {
    std::vector<std::string> words =
        with_model("train", {"--max_steps", "4", "--output_dir", folder_ / output});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  std::vector<std::string> paged(const std::string& output,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words =
        train(output, {"--memory_budget", "24MiB", "--spill_dir", folder_ / "disk"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  nlohmann::json results(const std::string& output) const {
    return nlohmann::json::parse(read_file(folder_ / (output + "/train_results.json")));
  }

  TemporaryFolder folder_;
};

TEST_F(PagedCommandsTest, AModelLargerThanItsBudgetTrainsToTheSameWeights) {
  const Outcome plain = run_program(train("plain", {}), folder_);
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  const Outcome outcome = run_program(paged("paged"), folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(results("paged")["weights_sha256"], results("plain")["weights_sha256"]);
  EXPECT_LE(results("paged")["peak_memory_bytes"], 24 * kMiB);
  EXPECT_LE(results("paged")["peak_memory_bytes"], results("paged")["predicted_peak_bytes"]);
  if (!kHasSanitizer) {  // which keeps what was freed
    EXPECT_LT(outcome.peak_resident_bytes, plain.peak_resident_bytes - 50 * kMiB)
        << "no part of the run may hold all of it";
  }
  EXPECT_TRUE(fs::is_empty(folder_ / "disk"));
  const auto plan = nlohmann::json::parse(read_file(folder_ / "paged/plan.json"));
  EXPECT_GT(plan["paging"]["bytes_read_per_update"], 0);
  EXPECT_EQ(read_file(folder_ / "paged/model.safetensors"),
            read_file(folder_ / "plain/model.safetensors"));
}

TEST_F(PagedCommandsTest, AKilledRunLeavesNothingAndItsLastSnapshotContinues) {
  ASSERT_EQ(run_program(paged("whole"), folder_).exit_code, 0);
  const Program program(paged("cut", {"--save_steps", "1"}), folder_);
  const bool sent =
      program.interrupt_when(SIGKILL, [&] { return fs::exists(folder_ / "cut/snapshot-2"); });
  program.wait();
  EXPECT_TRUE(fs::is_empty(folder_ / "disk"));
  ASSERT_TRUE(sent);
  const Outcome rest = run_program(paged("cut", {"--resume_from_checkpoint", "last"}), folder_);
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  EXPECT_EQ(results("cut")["weights_sha256"], results("whole")["weights_sha256"]);
  EXPECT_LE(results("cut")["peak_memory_bytes"], 24 * kMiB);
}

TEST_F(PagedCommandsTest, TheFloorIsToldWithAndWithoutAFolder) {
  const Outcome estimate = run_program(
      with_model("estimate", {"--memory_budget", "24MiB", "--spill_dir", folder_ / "disk"}),
      folder_);
  ASSERT_EQ(estimate.exit_code, 0) << estimate.err;
  EXPECT_NE(estimate.out.find("paged to --spill_dir"), std::string::npos) << estimate.out;
  EXPECT_NE(estimate.out.find("paged plan"), std::string::npos) << estimate.out;
  const Outcome refused = run_program(train("no_folder", {"--memory_budget", "64MiB"}), folder_);
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find("--spill_dir"), std::string::npos) << refused.err;
}

}  // namespace
}  // namespace headroom::testing
