// The model that a run leaves, and runs that start from one.
#include "apps/program.h"
#include "core/hash.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

class WeightsTest : public ::testing::Test {
 protected:
  Outcome train(const std::string& output, const std::vector<std::string>& more,
                const std::string& learning_rate = "0.01") const {
    std::vector<std::string> words = {"train",
                                      "--dataset",
                                      "synthetic",
                                      "--output_dir",
                                      folder_ / output,
                                      "--max_steps",
                                      "3",
                                      "--learning_rate",
                                      learning_rate,
                                      "--per_device_train_batch_size",
                                      "4"};
    words.insert(words.end(), more.begin(), more.end());
    return run_program(words, folder_);
  }
  Outcome train_gpt(const std::string& output) const {
    return train(
        output, {"--model", "gpt", "--model_config",
                 "n_layer=1,n_head=2,n_embd=8,block_size=6,vocab_size=11", "--logging_steps", "1"});
  }
  nlohmann::json json_of(const std::string& file) const {
    return nlohmann::json::parse(read_file(folder_ / file));
  }

  TemporaryFolder folder_;
};

TEST_F(WeightsTest, ARunLeavesItsModel) {
  const Outcome outcome = train_gpt("out");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string bytes = read_file(folder_ / "out/model.safetensors");
  Sha256 hash;
  hash.update(bytes.data(), bytes.size());
  EXPECT_EQ(json_of("out/train_results.json")["model_sha256"], hash.hex_digest());
  EXPECT_EQ(json_of("out/config.json")["model_type"], "gpt2");
  const auto state = json_of("out/trainer_state.json");
  EXPECT_EQ(state["global_step"], 3);
  EXPECT_EQ(state["max_steps"], 3);
  ASSERT_EQ(state["log_history"].size(), 3U);
  EXPECT_EQ(state["log_history"][2]["step"], 3);
  EXPECT_EQ(state["log_history"][2]["loss"], json_of("out/train_results.json")["final_loss"]);

  const Outcome none = train("none", {"--model_config", "hidden=8", "--save_model", "false"});
  ASSERT_EQ(none.exit_code, 0) << none.err;
  EXPECT_FALSE(fs::exists(folder_ / "none/model.safetensors"));
  EXPECT_FALSE(json_of("none/train_results.json").contains("model_sha256"));
}

// Two runs of three updates are six updates in one respect: the second starts where the first
// ended, and its first loss shows it.
TEST_F(WeightsTest, ARunStartsFromAFolder) {
  ASSERT_EQ(train_gpt("first").exit_code, 0);
  const std::string from = folder_ / "first";
  const Outcome second = train("second", {"--model_name_or_path", from}, "0");
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(read_file(folder_ / "second/model.safetensors"),
            read_file(folder_ / "first/model.safetensors"))
      << "a learning rate of 0 changes no weight";
  EXPECT_EQ(json_of("second/train_results.json")["num_parameters"],
            json_of("first/train_results.json")["num_parameters"]);

  const Outcome plan = run_program({"plan", "--model_name_or_path", from, "--dataset", "synthetic",
                                    "--memory_budget", "64MiB", "--json"},
                                   folder_);
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  fs::remove(folder_ / "first/model.safetensors");
  const Outcome estimate =
      run_program({"estimate", "--model_name_or_path", from, "--json"}, folder_);
  ASSERT_EQ(estimate.exit_code, 0) << "config.json is enough: " << estimate.err;
  EXPECT_EQ(nlohmann::json::parse(estimate.out)["num_parameters"],
            json_of("first/train_results.json")["num_parameters"]);
  EXPECT_EQ(train("third", {"--model_name_or_path", from}).exit_code, 3);
}

TEST_F(WeightsTest, AModelThatCannotBeReadSaysWhy) {
  EXPECT_EQ(train("out", {"--model_name_or_path", folder_ / "absent"}).exit_code, 3);
  EXPECT_EQ(train("out", {"--model_name_or_path", ""}).exit_code, 2);
  const Outcome both = train("out", {"--model_name_or_path", "x", "--model", "mlp"});
  EXPECT_EQ(both.exit_code, 2);
  EXPECT_NE(both.err.find("leave --model out"), std::string::npos) << both.err;
  EXPECT_EQ(train("out", {"--model_name_or_path", "x", "--model_config", "hidden=3"}).exit_code, 2);
  write_plain(folder_ / "config.json", R"({"model_type": "t5"})");
  const Outcome other = train("out", {"--model_name_or_path", folder_.path().string()});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_NE(other.err.find("gpt2"), std::string::npos) << "the known ones are named: " << other.err;
}

}  // namespace
}  // namespace headroom::testing
