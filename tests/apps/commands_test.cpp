// What the program does with good input.
#include "apps/program.h"
#include "support/sanitizer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <regex>
#include <string>
#include <tuple>
#include <vector>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

class CommandsTest : public ::testing::Test {
 protected:
  std::vector<std::string> train(const std::string& output,
                                 const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"train",     "--model_config", "hidden=64",     "--dataset",
                                      "synthetic", "--output_dir",   folder_ / output};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  nlohmann::json results(const std::string& output) const {
    return nlohmann::json::parse(read_file(folder_ / (output + "/train_results.json")));
  }

  TemporaryFolder folder_;
};

TEST_F(CommandsTest, HelpOfEverySubcommandShowsItsFlagsWithDefaults) {
  for (const std::string command : {"train", "plan", "compare"}) {
    const Outcome outcome = run_program({command, "--help"}, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_EQ(outcome.err, "") << command;
    for (const std::string part : {"--config", "--fp16 [TEXT]=false", "--shuffle [TEXT]=true",
                                   "--gradient_checkpointing [TEXT]"}) {
      EXPECT_NE(outcome.out.find(part), std::string::npos) << command << " --help lacks " << part;
    }
    for (const auto& [flag, value] : {std::pair<std::string, std::string>{"--model", "mlp"},
                                      {"--learning_rate", "5e-05"},
                                      {"--optim", "adamw"},
                                      {"--memory_budget", "none"},
                                      {"--seed", "42"}}) {
      const bool has_default =
          outcome.out.find(flag + " TEXT=" + value) != std::string::npos ||  // CLI11 before 2.4
          outcome.out.find(flag + " TEXT [" + value + "]") !=
              std::string::npos;  // and from then on
      EXPECT_TRUE(has_default) << command << " --help lacks the default of " << flag;
    }
  }
  for (const std::string command : {"estimate", "info"}) {
    const Outcome outcome = run_program({command, "--help"}, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_NE(outcome.out.find("--json"), std::string::npos) << command;
  }
  const Outcome all = run_program({"--help"}, folder_);
  EXPECT_EQ(all.exit_code, 0);
  const Outcome report = run_program({"report", "--help"}, folder_);
  EXPECT_EQ(report.exit_code, 0);
  for (const std::string part : {"DIR", "--output"})
    EXPECT_NE(report.out.find(part), std::string::npos) << part;
  for (const std::string command :
       {"train", "plan", "compare", "estimate", "evaluate", "generate", "report", "info"}) {
    EXPECT_NE(all.out.find("\n  " + command), std::string::npos) << command;
  }
}

TEST_F(CommandsTest, EverySubcommandTakesAConfigurationFile) {
  const auto with_file = [&](std::vector<std::string> words, const std::string& text) {
    std::ofstream(folder_ / "flags.json") << text;
    words.insert(words.end(), {"--config", folder_ / "flags.json"});
    return run_program(words, folder_);
  };
  const Outcome info = with_file({"info"}, R"({"json": true})");
  ASSERT_EQ(info.exit_code, 0) << info.err;
  EXPECT_TRUE(nlohmann::json::accept(info.out)) << info.out;
  ASSERT_EQ(run_program(train("run", {"--max_steps", "1"}), folder_).exit_code, 0);
  const std::string page = R"({"output": ")" + (folder_ / "page.html") + "\"}";
  EXPECT_EQ(with_file({"report", folder_ / "run"}, page).exit_code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "page.html"));
  EXPECT_EQ(with_file({"report", folder_ / "run", "--output", folder_ / "other.html"}, page).out,
            (folder_ / "other.html") + "\n")
      << "the command line wins";
  std::ofstream(folder_ / "chain.json") << R"({"stages": [{"output_bytes": 8, "grad_bytes": 8,
      "options": [{"kept_bytes": 8, "forward_ns": 1, "backward_ns": 1}]}]})";
  const Outcome plan = with_file({"plan"}, R"({"memory_budget": 100, "json": true, "chain": ")" +
                                               (folder_ / "chain.json") + "\"}");
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_EQ(nlohmann::json::parse(plan.out)["feasible"], true);
  for (const auto& [command, text, part] :
       {std::tuple<std::string, std::string, std::string>{"info", R"({"jsn": true})", "'json'"},
        {"generate", R"({"max_new_token": 3})", "'max_new_tokens'"},
        {"generate", R"({"max_new_tokens": 0})", "max_new_tokens"},
        {"plan", R"({"frontire": true})", "'frontier'"}}) {
    const Outcome refused = with_file({command}, text);
    EXPECT_EQ(refused.exit_code, 2) << command << text;
    EXPECT_NE(refused.err.find(part), std::string::npos) << refused.err;
  }
}

TEST_F(CommandsTest, VersionIsOneLine) {
  const Outcome outcome = run_program({"--version"}, folder_);
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out.rfind("headroom ", 0), 0U);
}

TEST_F(CommandsTest, InfoNamesBlasAndThreads) {
  const Outcome outcome = run_program({"info", "--json"}, folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_TRUE(json["blas_is_openmp"].get<bool>()) << json["blas"];
  EXPECT_GE(json["num_threads"].get<int>(), 1);
}

TEST_F(CommandsTest, EstimateSizesALargeModelWithoutMakingIt) {
  const Outcome small = run_program({"estimate", "--model", "mlp", "--json"}, folder_);
  ASSERT_EQ(small.exit_code, 0) << small.err;
  const std::vector<std::string> words = {
      "estimate", "--model", "gpt2-xl", "--memory_budget", "40GiB", "--global_batch_size", "16"};
  std::vector<std::string> with_json = words;
  with_json.emplace_back("--json");
  const Outcome large = run_program(with_json, folder_);
  ASSERT_EQ(large.exit_code, 0) << large.err;
  const auto json = nlohmann::json::parse(large.out);
  EXPECT_EQ(json["num_parameters"], 1557611200);
  EXPECT_EQ(json["policies"].size(), 4U);
  EXPECT_EQ(json["fits"],
            json["floor"]["peak_bytes"].get<std::int64_t>() <= std::int64_t{40} << 30);
  EXPECT_EQ(json["fits"], !json["ways"].empty());
  EXPECT_LT(large.peak_resident_bytes - small.peak_resident_bytes, std::int64_t{256} << 20)
      << "the weights alone are 5.8 GiB";
  const Outcome text = run_program(words, folder_);
  EXPECT_EQ(text.exit_code, 0);
  for (const std::string part : {"gpt2-xl", "adafactor", "leanest plan", "times are not known"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
  }
}

TEST_F(CommandsTest, PlanShowsTheStateOfEachOptimizer) {
  std::vector<std::string> words = {
      "plan", "--model", "mlp", "--model_config", "hidden=8,layers=1", "--dataset", "synthetic"};
  EXPECT_NE(run_program(words, folder_).out.find("adamw_8bit"), std::string::npos);
  words.push_back("--json");
  const auto json = nlohmann::json::parse(run_program(words, folder_).out);
  const std::int64_t num_parameters = 784 * 8 + 8 + 8 * 10 + 10;
  EXPECT_EQ(json["optimizer_state_bytes"]["sgd"], 0);
  EXPECT_EQ(json["optimizer_state_bytes"]["adamw"], 8 * num_parameters);
  EXPECT_EQ(json["optimizer_state_bytes"].size(), 5U);
}

TEST_F(CommandsTest, OneLineSaysHowHalfPrecisionIsUsed) {
  for (const std::string flag : {"--bf16", "--fp16"}) {
    const Outcome outcome =
        run_program(train("half", {flag, "--max_steps", "1", "--disable_tqdm"}), folder_);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NE(outcome.err.find(flag.substr(2) + ": "), std::string::npos) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  const Outcome refused =
      run_program(train("half", {"--fp16", "--half_precision_backend", "autocast"}), folder_);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--half_precision_backend keep"), std::string::npos) << refused.err;
}

TEST_F(CommandsTest, AFlagWinsOverTheConfigurationFile) {
  write_plain(
      folder_ / "run.json",
      R"({"max_steps": 5, "seed": 1, "per_device_train_batch_size": 4, "disable_tqdm": true})");
  const Outcome outcome = run_program(
      train("out", {"--config", folder_ / "run.json", "--max_steps", "2", "--json"}), folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["global_step"], 2) << "the flag's";
  EXPECT_EQ(json["micro_batch_size"], 4) << "the file's";
  EXPECT_EQ(json, results("out"));
}

TEST_F(CommandsTest, ASwitchStandsAloneOrTakesAValue) {
  const auto lines_on_stderr = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = train("out", {"--max_steps", "2"});
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(words, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return std::count(outcome.err.begin(), outcome.err.end(), '\n');
  };
  EXPECT_EQ(lines_on_stderr({"--disable_tqdm"}), 0);
  EXPECT_EQ(lines_on_stderr({"--disable_tqdm", "true"}), 0);
  EXPECT_EQ(lines_on_stderr({"--disable_tqdm", "false"}), 1);
  EXPECT_EQ(lines_on_stderr({}), 1);
}

TEST_F(CommandsTest, EverySignalToEndIsARequestToStopAndTheSecondEndsAtOnce) {
  const auto has_updates = [&](const std::string& output) {
    return [path = folder_ / (output + "/metrics.jsonl")] { return fs::exists(path); };
  };
  for (const int signal : {SIGTERM, SIGHUP}) {
    const std::string output = "cut" + std::to_string(signal);
    const Program program(train(output, {"--max_steps", "1000000"}), folder_);
    ASSERT_TRUE(program.interrupt_when(signal, has_updates(output)));
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
    EXPECT_NE(outcome.err.find("--resume_from_checkpoint"), std::string::npos) << outcome.err;
  }
  const Program program(train("twice", {"--max_steps", "1000000"}), folder_);
  ASSERT_TRUE(program.interrupt_when(SIGTERM, has_updates("twice")));
  ASSERT_TRUE(program.interrupt_when(SIGTERM, [] { return true; }));
  EXPECT_EQ(program.wait().exit_code, 130);

  // Both arrive before the program can answer the first: nothing is saved any more.
  const Program stopped(train("at_once", {"--max_steps", "1000000"}), folder_);
  ASSERT_TRUE(stopped.interrupt_when(SIGSTOP, has_updates("at_once")));
  for (const int signal : {SIGTERM, SIGINT, SIGCONT})
    ASSERT_EQ(::kill(stopped.process(), signal), 0);
  const Outcome at_once = stopped.wait();
  EXPECT_EQ(at_once.exit_code, 130) << at_once.err;
  EXPECT_EQ(at_once.err.find("--resume_from_checkpoint"), std::string::npos) << at_once.err;
  EXPECT_FALSE(fs::exists(folder_ / "at_once/train_results.json"));
}

TEST_F(CommandsTest, AnInterruptedRunSavesAndResumesToTheSameWeights) {
  const std::vector<std::string> flags = {"--max_steps",
                                          "300",
                                          "--per_device_train_batch_size",
                                          "8",
                                          "--gradient_accumulation_steps",
                                          "4",
                                          "--logging_steps",
                                          "1",
                                          "--learning_rate",
                                          "1e-3"};
  ASSERT_EQ(run_program(train("whole", flags), folder_).exit_code, 0);

  const Program program(train("cut", flags), folder_);
  const std::string metrics = folder_ / "cut/metrics.jsonl";
  const bool sent = program.interrupt_when(SIGINT, [&] {
    if (!fs::exists(metrics)) return false;
    const std::string text = read_file(metrics);
    return std::count(text.begin(), text.end(), '\n') >= 5;
  });
  const Outcome cut = program.wait();
  ASSERT_TRUE(sent) << cut.err;
  ASSERT_EQ(cut.exit_code, 130) << cut.err;
  EXPECT_NE(cut.err.find("--resume_from_checkpoint"), std::string::npos)
      << "the line says how to go on";
  const std::int64_t step = results("cut")["global_step"];
  EXPECT_GE(step, 5);
  EXPECT_LT(step, 300);
  EXPECT_TRUE(fs::is_directory(folder_ / ("cut/snapshot-" + std::to_string(step))));

  std::vector<std::string> resumed = train("cut", flags);
  resumed.push_back("--resume_from_checkpoint");
  const Outcome rest = run_program(resumed, folder_);
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  EXPECT_EQ(results("cut")["global_step"], 300);
  EXPECT_EQ(results("cut")["weights_sha256"], results("whole")["weights_sha256"]);
  EXPECT_EQ(results("cut")["train_loss"], results("whole")["train_loss"]);

  const auto steps_and_losses = [&](const std::string& output) {
    std::vector<std::pair<int, double>> lines;
    std::istringstream text(read_file(folder_ / (output + "/metrics.jsonl")));
    for (std::string line; std::getline(text, line);) {
      const auto json = nlohmann::json::parse(line);
      lines.emplace_back(json["step"], json["loss"]);
    }
    return lines;
  };
  EXPECT_EQ(steps_and_losses("cut"), steps_and_losses("whole"))
      << "the log of both parts reads as one";
}

TEST_F(CommandsTest, ReportMakesAPageOfARun) {
  ASSERT_EQ(run_program(train("out", {"--max_steps", "4", "--logging_steps", "1", "--memory_budget",
                                      "64MiB"}),
                        folder_)
                .exit_code,
            0);
  const Outcome outcome = run_program({"report", folder_ / "out"}, folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, folder_ / "out/report.html\n");
  const std::string page = read_file(folder_ / "out/report.html");
  for (const std::string part :
       {"<svg", "budget 64.00 MiB", "Memory of one step", "hidden=64", "</html>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  ASSERT_EQ(run_program({"report", folder_ / "out", "--output", folder_ / "page.html"}, folder_)
                .exit_code,
            0);
  EXPECT_EQ(read_file(folder_ / "page.html"), page);
}

TEST_F(CommandsTest, TheArgumentsOfARunAreAConfigurationFileThatMakesItAgain) {
  ASSERT_EQ(
      run_program(train("first", {"--max_steps", "3", "--learning_rate", "1e-3", "--optim", "sgd"}),
                  folder_)
          .exit_code,
      0);
  const Outcome again = run_program({"train", "--config", folder_ / "first/training_args.json",
                                     "--output_dir", folder_ / "second"},
                                    folder_);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(results("second")["weights_sha256"], results("first")["weights_sha256"]);
}

TEST_F(CommandsTest, ALanguageModelShowsPerplexityAndNoAccuracy) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "the quick brown fox jumps over the lazy dog ";
  write_plain(folder_ / "text.txt", text);
  const std::vector<std::string> words = {
      "train",
      "--model",
      "gpt",
      "--model_config",
      "n_layer=1,n_head=1,n_embd=8,block_size=16,vocab_size=256",
      "--dataset",
      folder_ / "text.txt",
      "--max_steps",
      "2",
      "--output_dir",
      folder_ / "out"};
  const Outcome outcome = run_program(words, folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("perplexity"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("accuracy"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.err.find("accuracy"), std::string::npos) << outcome.err;
  EXPECT_TRUE(results("out").contains("eval_loss"));
  EXPECT_FALSE(results("out").contains("eval_accuracy"));

  std::vector<std::string> comparing = words;
  comparing.front() = "compare";
  const Outcome table = run_program(comparing, folder_);
  ASSERT_EQ(table.exit_code, 0) << table.err;
  EXPECT_EQ(table.out.find("accuracy"), std::string::npos) << table.out;
  const std::string first_line = table.out.substr(0, table.out.find('\n'));
  EXPECT_NE(first_line.find("perplexity"), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find(" -\n"), std::string::npos) << "a row without one\n" << table.out;
}

TEST_F(CommandsTest, AMaskedLanguageModelReadsTextByBytesAndResumesWithTheSameBits) {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "the quick brown fox jumps over the lazy dog ";
  write_plain(folder_ / "text.txt", text);
  const std::vector<std::string> words = {
      "train",
      "--model",
      "bert",
      "--model_config",
      "num_hidden_layers=1,num_attention_heads=1,hidden_size=8,intermediate_size=16,"
      "max_position_embeddings=20,dropout=0.1",
      "--dataset",
      folder_ / "text.txt",
      "--global_batch_size",
      "64",
      "--per_device_train_batch_size",
      "24",
      "--max_steps",
      "4"};  // more than an epoch
  const auto run = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> all = words;
    all.insert(all.end(), {"--output_dir", folder_ / name});
    all.insert(all.end(), more.begin(), more.end());
    const Outcome outcome = run_program(all, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  };
  run("whole", {"--save_steps", "2"});
  run("resumed", {"--resume_from_checkpoint", folder_ / "whole/snapshot-2"});
  EXPECT_EQ(results("resumed")["weights_sha256"], results("whole")["weights_sha256"]);
  run("recomputed", {"--gradient_checkpointing", "every"});
  EXPECT_EQ(results("recomputed")["weights_sha256"], results("whole")["weights_sha256"]);
  std::vector<std::string> sampling = words;
  sampling.emplace_back("--sample");
  EXPECT_EQ(run_program(sampling, folder_).exit_code, 2) << "it continues no text";
}

// NiN halves 4x4 pixels twice, and its last BatchNorm sees one per sample.
TEST_F(CommandsTest, AModelThatCannotTrainOnOneSampleIsNoDefect) {
  for (const char* command : {"train", "plan"}) {
    const Outcome one =
        run_program({command, "--model", "nin", "--model_config", "rows=4,columns=4,width=4",
                     "--dataset", "synthetic", "--max_steps", "1", "--per_device_train_batch_size",
                     "1", "--memory_budget", "64MiB", "--output_dir", folder_ / "out"},
                    folder_);
    EXPECT_EQ(one.exit_code, 2) << one.err;
    EXPECT_NE(one.err.find("--per_device_train_batch_size"), std::string::npos) << one.err;
  }
}

TEST_F(CommandsTest, TrainingThatDivergesIsNoDefect) {
  const Outcome outcome =
      run_program(train("out", {"--optim", "sgd", "--learning_rate", "1e30", "--max_steps", "3",
                                "--error_on_nan", "--disable_tqdm"}),
                  folder_);
  EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
  EXPECT_NE(outcome.err.find("lower the learning rate"), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::is_directory(folder_ / "out/snapshot-1")) << "the last good state";
}

TEST_F(CommandsTest, CompareTrainsEveryVariantOnTheSameSamples) {
  const Outcome outcome =
      run_program({"compare", "--model_config", "hidden=8", "--dataset", "synthetic",
                   "--global_batch_size", "32", "--max_steps", "3", "--memory_budget", "4MiB",
                   "--output_dir", folder_ / "out", "--json"},
                  folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto rows = nlohmann::json::parse(outcome.out);
  ASSERT_EQ(rows.size(), 5U);
  EXPECT_EQ(rows[0]["gradient_accumulation_steps"], 1);
  EXPECT_EQ(rows[1]["gradient_accumulation_steps"], 4);
  EXPECT_EQ(rows[2]["weights_sha256"], rows[0]["weights_sha256"]) << "checkpointing changes no bit";
  EXPECT_EQ(rows[3]["weights_sha256"], rows[1]["weights_sha256"]);
  EXPECT_LT(rows[1]["peak_activation_bytes"], rows[0]["peak_activation_bytes"]);
  for (const auto& row : rows) {
    EXPECT_TRUE(row["fits"].get<bool>());
    EXPECT_NEAR(row["final_loss"].get<double>(), rows[0]["final_loss"].get<double>(), 1e-5);
  }
  EXPECT_LE(rows[4]["peak_memory_bytes"], 4 << 20);
}

// All samples at once are more than the address space that the program may have.
TEST_F(CommandsTest, CompareSaysWhatDoesNotFitAndTakesTheRatiosFromTheFirstThatDoes) {
  if (kHasSanitizer) GTEST_SKIP() << "a sanitizer takes more addresses than the limit";
  constexpr std::int64_t kSamples = 1024, kSide = 700;
  const auto write_npy = [&](const std::string& name, const std::string& shape,
                             std::int64_t num_bytes) {
    std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': (" + shape + "), }";
    header.resize(118, ' ');
    const std::string path = folder_ / ("data/" + name);
    write_plain(path, std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header);
    fs::resize_file(path, static_cast<std::uintmax_t>(128 + num_bytes));  // zeros, without disk
  };
  fs::create_directories(folder_ / "data");
  write_npy("inputs.npy", "1024, 1, 700, 700", kSamples * kSide * kSide);
  write_npy("targets.npy", "1024,", kSamples);
  const std::vector<std::string> words = {"compare",
                                          "--model_config",
                                          "hidden=2,layers=1,rows=700,columns=700",
                                          "--dataset",
                                          folder_ / "data",
                                          "--shuffle",
                                          "false",
                                          "--global_batch_size",
                                          "1024",
                                          "--per_device_train_batch_size",
                                          "16",
                                          "--max_steps",
                                          "1",
                                          "--output_dir",
                                          folder_ / "out"};
  const Program program(words, folder_, {}, [] {
    const rlimit limit{rlim_t{3} << 30, rlim_t{3} << 30};
    ::setrlimit(RLIMIT_AS, &limit);
  });
  const Outcome text = program.wait();
  ASSERT_EQ(text.exit_code, 0) << text.err;
  const std::string plain = text.out.substr(text.out.find("plain"));
  EXPECT_NE(plain.substr(0, plain.find('\n')).find("does not fit"), std::string::npos) << text.out;
  const std::string first = text.out.substr(text.out.find("+ accumulation"));
  EXPECT_EQ(first.substr(0, first.find('\n')).find("x)"), std::string::npos)
      << "the base of the ratios has none\n"
      << text.out;
  const std::string both = text.out.substr(text.out.find("+ both"));
  const std::regex time_cell("([0-9.]+) s( \\(([0-9.]+)x\\))?");
  std::smatch of_first, of_both;
  ASSERT_TRUE(std::regex_search(first, of_first, time_cell)) << text.out;
  ASSERT_TRUE(std::regex_search(both, of_both, time_cell) && of_both[3].matched) << text.out;
  const double ratio = std::stod(of_both[1]) / std::stod(of_first[1]);
  EXPECT_NEAR(std::stod(of_both[3]), ratio, 0.02 * ratio) << text.out;
  for (const std::string part : {"\nplain: memory ran out", "\n+ checkpointing: memory ran out"})
    EXPECT_NE(text.out.find(part), std::string::npos) << part << " is missing:\n" << text.out;
}

}  // namespace
}  // namespace headroom::testing
