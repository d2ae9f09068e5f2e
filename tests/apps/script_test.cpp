// `--model PATH.pt`: every command on a TorchScript file, and what it says of files that cannot be
// trained.
#include "apps/program.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

// What the Python program of these tests prints.
std::string run_python(const std::string& arguments) {
  const std::string command = "/usr/bin/python3 " + std::string(HEADROOM_SOURCE_DIR) +
                              "/tests/apps/script_files.py " + arguments;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  std::string text;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
  EXPECT_EQ(::pclose(pipe), 0) << "PyTorch is needed (Debian: python3-torch): " << command;
  return text;
}

class ScriptCommands : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = std::make_unique<TemporaryFolder>();
    run_python("write " + files_->path().string());
    std::string text;
    for (int i = 0; i < 40; ++i)
      text += "Any model, in the bytes you have. Line " + std::to_string(i);
    write_plain(*files_ / "text.txt", text);
  }
  static void TearDownTestSuite() { files_.reset(); }

  using Words = std::vector<std::string>;

  static Words joined(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  static Words images(const std::string& command, const std::string& model, const Words& more) {
    return joined({command, "--model", *files_ / (model + ".pt"), "--model_config",
                   "channels=1,rows=12,columns=12", "--dataset", "synthetic"},
                  more);
  }

  static Words tokens(const std::string& model, const Words& more) {
    return joined({"train", "--model", *files_ / (model + ".pt"), "--model_config",
                   "length=24,vocab_size=256", "--dataset", *files_ / "text.txt"},
                  more);
  }

  Outcome run(const Words& words) const { return run_program(words, folder_); }

  nlohmann::json run_json(Words words) const {
    words.emplace_back("--json");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.exit_code == 0 ? nlohmann::json::parse(outcome.out) : nlohmann::json();
  }

  Words training(const std::string& output, const Words& more) const {
    return images("train", "classifier",
                  joined({"--global_batch_size", "16", "--per_device_train_batch_size", "16",
                          "--max_steps", "3", "--output_dir", folder_ / output, "--disable_tqdm"},
                         more));
  }

  static std::unique_ptr<TemporaryFolder> files_;
  TemporaryFolder folder_;
};

std::unique_ptr<TemporaryFolder> ScriptCommands::files_;

TEST_F(ScriptCommands, PlanTrainAndPythonHaveTheSameModel) {
  const nlohmann::json plain = run_json(training("plain", {}));
  const nlohmann::json plan =
      run_json(images("plan", "classifier",
                      {"--global_batch_size", "16", "--per_device_train_batch_size", "16",
                       "--memory_budget", "1GiB"}));
  // Not much less: how much scratch memory a convolution takes differs from CPU to CPU.
  const std::int64_t budget = plan.at("predicted_peak_bytes").get<std::int64_t>() * 9 / 10;
  const nlohmann::json lean =
      run_json(training("lean", {"--memory_budget", std::to_string(budget)}));
  EXPECT_EQ(lean.at("weights_sha256"), plain.at("weights_sha256")) << "a budget changes no bit";
  EXPECT_LE(lean.at("peak_memory_bytes"), budget);
  EXPECT_LE(lean.at("peak_memory_bytes"), lean.at("predicted_peak_bytes"));
  EXPECT_EQ(run_python("hash " + folder_ / "lean/model.pt"),
            lean.at("weights_sha256").get<std::string>() + "\n");
  EXPECT_FALSE(fs::exists(folder_ / "lean/model.safetensors")) << "the weights are in model.pt";
}

TEST_F(ScriptCommands, ResumesBitByBit) {
  const nlohmann::json whole = run_json(training("whole", {}));
  run_json(training("parts", {"--save_steps", "2"}));
  const nlohmann::json resumed =
      run_json(training("parts", {"--resume_from_checkpoint", folder_ / "parts/snapshot-2"}));
  EXPECT_EQ(resumed.at("weights_sha256"), whole.at("weights_sha256"));
}

TEST_F(ScriptCommands, EvaluateReadsTheFolderOfARunAndAFile) {
  run_json(training("run", {}));
  const nlohmann::json by_folder =
      run_json({"evaluate", folder_ / "run", "--dataset", "synthetic"});
  EXPECT_NEAR(by_folder.at("eval_loss").get<double>(), std::log(10.0), 0.2) << "hardly trained";
  const nlohmann::json by_file =
      run_json({"evaluate", "--model", folder_ / "run/model.pt", "--model_config",
                "channels=1,rows=12,columns=12", "--dataset", "synthetic"});
  EXPECT_EQ(by_file, by_folder);
  EXPECT_EQ(run({"generate", folder_ / "run"}).exit_code, 2) << "no language model of ours";
}

TEST_F(ScriptCommands, AFolderCanBeTrainedOn) {
  run_json(training("run", {}));
  const nlohmann::json more =
      run_json({"train", "--model_name_or_path", folder_ / "run", "--dataset", "synthetic",
                "--max_steps", "1", "--output_dir", folder_ / "more", "--disable_tqdm"});
  EXPECT_EQ(run_python("hash " + folder_ / "more/model.pt"),
            more.at("weights_sha256").get<std::string>() + "\n");
}

TEST_F(ScriptCommands, CompareRunsEveryVariant) {
  const nlohmann::json rows =
      run_json(images("compare", "classifier",
                      {"--global_batch_size", "8", "--max_steps", "1", "--memory_budget", "1GiB",
                       "--output_dir", folder_ / "compare"}));
  ASSERT_EQ(rows.size(), 5U);
  for (const nlohmann::json& row : rows) EXPECT_TRUE(row.at("fits")) << row;
}

TEST_F(ScriptCommands, EstimateCountsWhereEveryOperationHasShapes) {
  const nlohmann::json counted =
      run_json(images("estimate", "classifier", {"--global_batch_size", "16"}));
  EXPECT_FALSE(counted.at("bytes_are_measured"));
  const nlohmann::json trained = run_json(training("run", {"--gradient_checkpointing", "every"}));
  const std::int64_t peak = trained.at("peak_memory_bytes");
  const std::int64_t estimated = counted.at("policies")[1]["peak_bytes"];
  EXPECT_GE(estimated, peak);
  // A net so small shows that the gradient of a stage's output may be freed earlier than counted.
  EXPECT_LE(estimated, peak + peak / 7);
  const Outcome measured = run({"estimate", "--model", *files_ / "language_model.pt",
                                "--model_config", "length=24,vocab_size=256", "--dataset",
                                *files_ / "text.txt", "--global_batch_size", "8"});
  EXPECT_EQ(measured.exit_code, 0) << measured.err;
  EXPECT_NE(measured.out.find("ytes are "), std::string::npos) << measured.out;
}

TEST_F(ScriptCommands, TokensAndAModelsOwnLoss) {
  const Words more = {"--global_batch_size", "4", "--max_steps", "2", "--shuffle", "false"};
  const nlohmann::json ours =
      run_json(tokens("language_model", joined(more, {"--output_dir", folder_ / "ours"})));
  const nlohmann::json own = run_json(
      tokens("own_loss", joined(more, {"--loss", "model", "--output_dir", folder_ / "own"})));
  EXPECT_NEAR(ours.at("train_loss"), own.at("train_loss"), 1e-5)
      << "the same weights, data and loss";
}

TEST_F(ScriptCommands, AdaptersAreTrainedEvaluatedAndMerged) {
  const Words lora = {"--lora_r", "4", "--lora_dropout", "0.1", "--learning_rate", "0.1"};
  const nlohmann::json run =
      run_json(training("adapted", joined(lora, {"--lora_merge", "--save_steps", "2"})));
  EXPECT_EQ(run.at("num_parameters"), 4 * (8 + 10)) << "of the one linear layer";
  EXPECT_FALSE(fs::exists(folder_ / "adapted/config.json")) << "no model by itself";
  EXPECT_EQ(run_python("changed " + *files_ / "classifier.pt" + " " +
                       folder_ / "adapted/base_model/model.pt"),
            "\n");
  EXPECT_EQ(run_python("changed " + *files_ / "classifier.pt" + " " +
                       folder_ / "adapted/merged/model.pt"),
            "head.weight\n");
  const nlohmann::json adapted =
      run_json({"evaluate", folder_ / "adapted", "--dataset", "synthetic"});
  EXPECT_EQ(run_json({"evaluate", folder_ / "adapted/merged", "--dataset", "synthetic"}), adapted);
  EXPECT_NE(run_json({"evaluate", folder_ / "adapted/base_model", "--dataset", "synthetic"}),
            adapted);

  const nlohmann::json resumed = run_json(training(
      "adapted", joined(lora, {"--resume_from_checkpoint", folder_ / "adapted/snapshot-2"})));
  EXPECT_EQ(resumed.at("weights_sha256"), run.at("weights_sha256"));
  const nlohmann::json half = run_json(training("half", joined(lora, {"--freeze", "head.lora_A"})));
  EXPECT_EQ(half.at("num_parameters"), 4 * 10);
  const nlohmann::json counted =
      run_json(images("estimate", "classifier",
                      {"--global_batch_size", "16", "--lora_r", "4", "--lora_dropout", "0.1"}));
  const std::int64_t peak = run.at("peak_memory_bytes");
  const std::int64_t estimated = counted.at("policies")[0]["peak_bytes"];
  EXPECT_GE(estimated, peak);
  EXPECT_LE(estimated, peak + peak / 20);

  const Outcome refused =
      run_program(training("none", {"--lora_r", "4", "--lora_target_modules", "conv2"}), folder_);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("(all-linear, head)"), std::string::npos) << refused.err;
  EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
}

// What is said of a file, and with which exit code.
struct Refusal {
  const char* model;
  int exit_code;
  const char* remedy;
};

TEST_F(ScriptCommands, WhatCannotBeTrainedIsRefusedWithARemedy) {
  for (const Refusal& refusal : {
           Refusal{"frozen", 2, "torch.jit.freeze"},
           Refusal{"eval_trace", 2, "model.train()"},
           Refusal{"no_gradient", 2, "torch.no_grad"},
           Refusal{"no_derivative", 2, "backward fails"},
           Refusal{"state_dict", 3, "torch.jit.script"},
           Refusal{"truncated", 3, "no whole TorchScript file"},
           Refusal{"missing", 3, "missing.pt"},
           Refusal{"language_model", 3, "inputs Float[2, 1, 12, 12]"},
       }) {
    SCOPED_TRACE(refusal.model);
    const Outcome outcome =
        run(images("train", refusal.model, {"--max_steps", "1", "--output_dir", folder_ / "run"}));
    EXPECT_EQ(outcome.exit_code, refusal.exit_code) << outcome.err;
    EXPECT_NE(outcome.err.find(refusal.remedy), std::string::npos) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  const Outcome trusted =
      run(images("train", "no_derivative",
                 {"--trust_model", "--max_steps", "1", "--output_dir", folder_ / "run"}));
  EXPECT_EQ(trusted.exit_code, 2) << trusted.err;
}

TEST_F(ScriptCommands, FlagsThatMakeNoSenseAreRefused) {
  EXPECT_EQ(run(images("train", "classifier", {"--loss", "hinge"})).exit_code, 2);
  EXPECT_EQ(run(images("train", "classifier", {"--sample"})).exit_code, 2);
  EXPECT_EQ(run(images("train", "classifier", {"--memory_budget", "1KiB"})).exit_code, 4);
  const Outcome outcome = run({"train", "--model", *files_ / "classifier.pt", "--model_config",
                               "chanels=1", "--dataset", "synthetic"});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("channels"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace headroom::testing
