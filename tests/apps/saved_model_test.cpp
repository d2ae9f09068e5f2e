// `headroom evaluate` and `headroom generate` on what `headroom train` leaves.
#include "apps/program.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

class SavedModelTest : public ::testing::Test {
 protected:
  SavedModelTest() {
    std::string text;
    for (int i = 0; i < 60; ++i)
      text += "The plan keeps the model in memory, line " + std::to_string(i) + ".\n";
    write_plain(folder_ / "text.txt", text);
  }

  // Trains a small language model on the text, and returns its train_results.json.
  nlohmann::json train(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"train",
                                      "--model",
                                      "gpt",
                                      "--model_config",
                                      "n_layer=2,n_head=2,n_embd=16,block_size=32,vocab_size=512",
                                      "--dataset",
                                      folder_ / "text.txt",
                                      "--max_steps",
                                      "4",
                                      "--learning_rate",
                                      "0.01",
                                      "--output_dir",
                                      folder_ / "run",
                                      "--disable_tqdm"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(words, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(folder_ / "run/train_results.json"));
  }

  Outcome run(const std::vector<std::string>& words) const { return run_program(words, folder_); }

  nlohmann::json run_json(std::vector<std::string> words) const {
    words.emplace_back("--json");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.exit_code == 0 ? nlohmann::json::parse(outcome.out) : nlohmann::json();
  }

  TemporaryFolder folder_;
};

TEST_F(SavedModelTest, EvaluateGivesTheNumbersOfTraining) {
  const nlohmann::json trained = train({});
  const nlohmann::json by_place =
      run_json({"evaluate", folder_ / "run", "--dataset", folder_ / "text.txt"});
  EXPECT_EQ(by_place["eval_loss"], trained["eval_loss"]);
  EXPECT_NEAR(by_place["perplexity"], std::exp(trained["eval_loss"].get<double>()), 1e-6);
  const nlohmann::json by_flag =
      run_json({"evaluate", "--model_name_or_path", folder_ / "run", "--dataset",
                folder_ / "text.txt", "--memory_budget", "4MiB"});
  EXPECT_EQ(by_flag["eval_loss"], trained["eval_loss"]);
  EXPECT_LE(by_flag["peak_memory_bytes"], 4 << 20);
  const Outcome text = run({"evaluate", folder_ / "run", "--dataset", folder_ / "text.txt"});
  EXPECT_NE(text.out.find("perplexity"), std::string::npos) << text.out;
  EXPECT_FALSE(fs::exists(folder_ / "outputs")) << "evaluating writes nothing";
}

TEST_F(SavedModelTest, GenerateContinuesAPromptByBytes) {
  train({});
  const std::vector<std::string> words = {"generate", folder_ / "run",    "--prompt",
                                          "The plan", "--max_new_tokens", "20"};
  const nlohmann::json first = run_json(words);
  EXPECT_EQ(first["prompt"], "The plan");
  EXPECT_EQ(first["tokens"].size(), 20U);
  EXPECT_EQ(run_json(words), first) << "the same seed";
  std::vector<std::string> other = words;
  other.insert(other.end(), {"--seed", "7"});
  EXPECT_NE(run_json(other)["tokens"], first["tokens"]);
  std::vector<std::string> likeliest = words;
  likeliest.insert(likeliest.end(), {"--temperature", "0"});
  std::vector<std::string> of_one = words;
  of_one.insert(of_one.end(), {"--top_k", "1", "--seed", "9"});
  EXPECT_EQ(run_json(likeliest)["tokens"], run_json(of_one)["tokens"]);
  const Outcome text = run(words);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(text.out.rfind("The plan", 0), 0U) << text.out;
}

TEST_F(SavedModelTest, TheTokenizerStaysWithTheModel) {
  const std::string tokenizer =
      std::string(HEADROOM_SOURCE_DIR) + "/tests/data/tokenizers/gpt2.json";
  const nlohmann::json trained = train({"--tokenizer", tokenizer});
  EXPECT_TRUE(fs::exists(folder_ / "run/tokenizer.json"));
  EXPECT_EQ(run_json({"evaluate", folder_ / "run", "--dataset", folder_ / "text.txt"})["eval_loss"],
            trained["eval_loss"]);
  const nlohmann::json made = run_json({"generate", folder_ / "run", "--prompt", "The plan keeps",
                                        "--max_new_tokens", "8", "--temperature", "0"});
  EXPECT_LE(made["tokens"].size(), 8U);
  EXPECT_GE(made["tokens"].size(), 1U);
}

TEST_F(SavedModelTest, EvaluateCountsTheAnswersOfAClassifier) {
  const Outcome trained =
      run({"train", "--model", "mlp", "--model_config", "hidden=16", "--dataset", "synthetic",
           "--max_steps", "2", "--output_dir", folder_ / "mlp", "--disable_tqdm"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const nlohmann::json result = run_json({"evaluate", folder_ / "mlp", "--dataset", "synthetic"});
  EXPECT_GT(result["eval_accuracy"], 0.0);
  EXPECT_FALSE(result.contains("perplexity"));
  EXPECT_EQ(run({"generate", folder_ / "mlp"}).exit_code, 2) << "no language model";
}

TEST_F(SavedModelTest, RefusesWhatItCannotServe) {
  EXPECT_EQ(run({"generate"}).exit_code, 2);
  EXPECT_EQ(run({"evaluate"}).exit_code, 2);
  EXPECT_EQ(run({"generate", folder_ / "missing"}).exit_code, 3);
  EXPECT_EQ(run({"evaluate", folder_ / "missing", "--dataset", "synthetic"}).exit_code, 3);
  EXPECT_EQ(run({"generate", "a", "--model_name_or_path", "b"}).exit_code, 2);
  EXPECT_EQ(run({"generate", "a", "--temperature", "-1"}).exit_code, 2);
  EXPECT_EQ(run({"generate", "a", "--max_new_tokens", "0"}).exit_code, 2);
  train({});
  EXPECT_EQ(run({"generate", folder_ / "run", "--memory_budget", "1KiB"}).exit_code, 4);
  EXPECT_EQ(run({"generate", folder_ / "run", "--tokenizer", folder_ / "none.json"}).exit_code, 3);
}

TEST_F(SavedModelTest, HelpShowsFlagsWithDefaults) {
  const Outcome generate = run({"generate", "--help"});
  EXPECT_EQ(generate.exit_code, 0);
  for (const std::string part : {"DIR", "--prompt", "--max_new_tokens", "--temperature", "--top_k",
                                 "--seed", "--memory_budget", "--tokenizer", "100"})
    EXPECT_NE(generate.out.find(part), std::string::npos) << part;
  EXPECT_EQ(generate.out.find("--learning_rate"), std::string::npos);
  const Outcome evaluate = run({"evaluate", "--help"});
  EXPECT_EQ(evaluate.exit_code, 0);
  for (const std::string part : {"DIR", "--dataset", "--memory_budget", "--json"})
    EXPECT_NE(evaluate.out.find(part), std::string::npos) << part;
}

}  // namespace
}  // namespace headroom::testing
