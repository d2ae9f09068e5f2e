// Training on several ranks with the program itself.
#include "apps/program.h"
#include "support/ports.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModel = "n_layer=1,n_head=2,n_embd=16,block_size=8,vocab_size=32,dropout=0";

Program::Variables rank_variables(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

class RanksOfTheProgram : public ::testing::Test {
 protected:
  std::vector<std::string> train(const std::string& output,
                                 const std::vector<std::string>& more) const {
    std::vector<std::string> words = {
        "train",        "--model",        "gpt",           "--model_config",
        kModel,         "--dataset",      "synthetic",     "--global_batch_size",
        "12",           "--disable_tqdm", "--ddp_timeout", "50",
        "--output_dir", folder_ / output};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  nlohmann::json results(const std::string& output) const {
    return nlohmann::json::parse(read_file(folder_ / (output + "/train_results.json")));
  }

  // True once so many updates are in the log.
  std::function<bool()> has_logged(const std::string& output, std::int64_t num_updates) const {
    return [path = folder_ / (output + "/metrics.jsonl"), num_updates] {
      if (!fs::exists(path)) return false;
      const std::string text = read_file(path);
      return std::count(text.begin(), text.end(), '\n') >= num_updates;
    };
  }

  TemporaryFolder folder_;
};

// What is ours: newer versions of Gloo say on standard error that they are connected.
std::string without_lines_of_gloo(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("gloo/") == std::string::npos || line.front() != '[') kept += line + "\n";
  }
  return kept;
}

TEST_F(RanksOfTheProgram, AreStartedByAFlagAndGiveOneSetOfResults) {
  const std::vector<std::string> length = {"--max_steps", "6", "--logging_steps", "1"};
  const Outcome one = run_program(train("one", length), folder_);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  std::vector<std::string> words = train("two", length);
  words.insert(words.end(), {"--nproc_per_node", "2"});
  const Outcome two = run_program(words, folder_);
  ASSERT_EQ(two.exit_code, 0) << two.err;
  EXPECT_EQ(without_lines_of_gloo(two.err), "");
  EXPECT_EQ(two.out.find("updates "), two.out.rfind("updates "))
      << "rank 0 alone prints: " << two.out;
  EXPECT_EQ(results("two")["world_size"], 2);
  EXPECT_EQ(results("two")["micro_batch_size"], 6);
  EXPECT_NEAR(results("two")["train_loss"].get<double>(),
              results("one")["train_loss"].get<double>(), 1e-5);
  EXPECT_GT(results("two")["train_samples_per_second"].get<double>(), 0);
  EXPECT_EQ(nlohmann::json::parse(read_file(folder_ / "two/plan.json"))["world_size"], 2);
}

TEST_F(RanksOfTheProgram, OneThatIsKilledEndsTheOthersWithSix) {
  const int port = free_port();
  const std::vector<std::string> words =
      train("out", {"--max_steps", "1000000", "--logging_steps", "5"});
  const Program first(words, folder_, rank_variables(0, 2, port));
  const Program second(words, folder_, rank_variables(1, 2, port));
  EXPECT_TRUE(second.interrupt_when(SIGKILL, has_logged("out", 2)));
  EXPECT_EQ(second.wait().exit_code, -SIGKILL);
  const Outcome outcome =
      first.wait();  // the timeout is 50 s; the closed connection is noticed at once
  EXPECT_EQ(outcome.exit_code, 6) << outcome.err;
  const std::string said = without_lines_of_gloo(outcome.err);
  EXPECT_EQ(said.rfind("headroom: rank 0 of 2 lost another rank", 0), 0U) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_FALSE(fs::exists(folder_ / "out/train_results.json"));
  for (const auto& entry : fs::directory_iterator(folder_ / "out")) {
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  }
}

// Nothing was trained that could be saved: one signal is enough, however long the wait may last.
TEST_F(RanksOfTheProgram, OneThatIsStoppedBeforeTheOthersCameEndsAtOnce) {
  const int port = free_port();
  const Program first(train("out", {"--max_steps", "1"}), folder_, rank_variables(0, 2, port));
  ASSERT_TRUE(first.interrupt_when(SIGTERM, [&] { return is_listened_on(port); }));
  const Outcome outcome = first.wait();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  const std::string said = without_lines_of_gloo(outcome.err);
  EXPECT_EQ(said, "headroom: interrupted before training began\n");
}

TEST_F(RanksOfTheProgram, EnvironmentVariablesThatMakeNoSenseAreOneLineAndExitTwo) {
  const std::vector<Program::Variables> cases = {
      {{"RANK", "0"}}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}};
  for (const Program::Variables& variables : cases) {
    const Outcome outcome = Program(train("out", {"--max_steps", "1"}), folder_, variables).wait();
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(variables[0].first), std::string::npos) << outcome.err;
  }
  const Outcome contradiction =
      Program(train("out", {"--nproc_per_node", "3"}), folder_, rank_variables(0, 2, 1234)).wait();
  EXPECT_EQ(contradiction.exit_code, 2) << contradiction.err;
  EXPECT_EQ(run_program({"compare", "--nproc_per_node", "2"}, folder_).exit_code, 2);
}

TEST_F(RanksOfTheProgram, APlanIsThatOfTheShareOfARank) {
  const Outcome outcome = run_program(
      {"plan", "--dataset", "synthetic", "--global_batch_size", "31", "--nproc_per_node", "2",
       "--memory_budget", "64MiB", "--json", "--output_dir", folder_ / "out"},
      folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto plan = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(plan["world_size"], 2);
  EXPECT_EQ(plan["global_batch_size"], 31);
  const int samples =
      plan["micro_batch_size"].get<int>() * plan["gradient_accumulation_steps"].get<int>();
  EXPECT_GE(samples, 16) << "the larger share";
  EXPECT_LT(samples, 31);
}

}  // namespace
}  // namespace headroom::testing
