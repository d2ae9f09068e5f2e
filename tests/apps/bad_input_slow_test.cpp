// What the program says to bad input: one line on standard error, the documented exit code, and no
// file half-written.
#include "apps/bad_input.h"
#include "support/refused_values.h"
#include "support/scale.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>
#include <random>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

TEST_F(BadInputTest, CommandsAndFlags) {
  expect_refused({
      {{}, 2, "command"},
      {{"trian"}, 2, "did you mean 'train'"},
      {{"train", "--lerning_rate", "1"}, 2, "did you mean '--learning_rate'"},
      {{"info", "--verbose"}, 2, "--verbose"},
      {train({"--model", "mpl"}), 2, "did you mean 'mlp'"},
      {{"train", "--model_config", "hiden=8", "--dataset", "synthetic"},
       2,
       "did you mean 'hidden'"},
      {{"train", "--model_config", "hidden=-8", "--dataset", "synthetic"}, 2, "'-8'"},
      {{"train", "--model_config", "hidden", "--dataset", "synthetic"}, 2, "hidden"},
      {train({"--memory_budget", "1GiB", "--spill_dir", "/nowhere/to/spill"}), 2,
       "--spill_dir '/nowhere/to/spill'"},
      {train({"--memory_budget", "1GiB", "--spill_dir", "/etc/passwd"}), 2,
       "--spill_dir '/etc/passwd'"},
      {train({"--spill_dir", "/tmp"}), 2, "--memory_budget"},
      {train({"--optim", "adm"}), 2, "did you mean 'adam'"},
      {train({"--lr_scheduler_type", "cosin"}), 2, "did you mean 'cosine'"},
      {train({"--eval_strategy", "often"}), 2, "'often'"},
      {train({"--max_steps", "ten"}), 2, "'ten'"},
      {train({"--max_steps", "1.5"}), 2, "'1.5'"},
      {train({"--max_steps", "0"}), 2, "max_steps"},
      {train({"--max_steps"}), 2, "--max_steps"},
      {train({"--max_steps", "2", "--max_steps", "3"}), 2, "--max_steps"},
      {train({"--learning_rate", "fast"}), 2, "'fast'"},
      {train({"--learning_rate", "nan"}), 2, "'nan'"},
      {train({"--per_device_train_batch_size", "-4"}), 2, "'-4'"},
      {train({"--per_device_train_batch_size", "0"}), 2, "per_device_train_batch_size"},
      {train({"--gradient_accumulation_steps", "four"}), 2, "--gradient_accumulation_steps"},
      {train({"--gradient_accumulation_steps", "4:2,0:8"}), 2, "--gradient_accumulation_steps"},
      {train({"--seed", "99999999999999999999"}), 2, "'99999999999999999999'"},
      {train({"--shuffle", "perhaps"}), 2, "'perhaps'"},
      {train({"--device", "tpu"}), 2, "'tpu'"},
      {train({"--gradient_checkpointing", "segments=0"}), 2, "segments=0"},
  });
}

// A sample of what tests/config tries one by one; HEADROOM_TEST_SCALE=50 takes them all.
TEST_F(BadInputTest, EveryNumberHasItsRange) {
  std::vector<BadInput> all;
  for (const ArgumentField& field : argument_fields()) {
    if (field.range.empty()) continue;
    std::vector<std::string> values = refused_values(field);
    if (!field.value_is_optional) values.emplace_back("");  // others stand alone then
    for (const std::string& value : values)
      all.push_back({train({"--" + field.name + "=" + value}), 2, field.name});
  }
  std::shuffle(all.begin(), all.end(), std::mt19937(7));
  ASSERT_GE(all.size(), 300U);
  all.resize(std::min(all.size(), static_cast<std::size_t>(scaled(16))));
  expect_refused(all);
}

TEST_F(BadInputTest, ContradictoryFlags) {
  expect_refused({
      {train({"--fp16", "--bf16"}), 2, "--fp16 and --bf16"},
      {train({"--global_batch_size", "64", "--gradient_accumulation_steps", "4"}), 2,
       "--gradient_accumulation_steps"},
      {train({"--global_batch_size", "64", "--per_device_train_batch_size", "128"}), 2,
       "--global_batch_size"},
      {train({"--gradient_checkpointing", "optimal"}), 2, "--memory_budget"},
      {train({"--dataloader_drop_last", "--global_batch_size", "5000"}), 2,
       "--dataloader_drop_last"},
      {{"plan", "--frontier"}, 2, "--chain"},
  });
}

TEST_F(BadInputTest, ConfigurationFiles) {
  const auto config = [&](const std::string& name, const std::string& text) {
    write_plain(folder_ / name, text);
    return train({"--config", folder_ / name});
  };
  expect_refused({
      {train({"--config", folder_ / "absent.json"}), 2, folder_ / "absent.json"},
      {config("no.json", "max_steps = 5"), 2, folder_ / "no.json"},
      {config("empty.json", ""), 2, folder_ / "empty.json"},
      {config("list.json", "[1]"), 2, folder_ / "list.json"},
      {config("unknown.json", R"({"max_step": 5})"), 2, "did you mean 'max_steps'"},
      {config("type.json", R"({"max_steps": true})"), 2, "'true'"},
      {config("nested.json", R"({"max_steps": {"value": 5}})"), 2, "'max_steps'"},
      {config("range.json", R"({"logging_steps": -1})"), 2, "logging_steps"},
  });
}

TEST_F(BadInputTest, Budgets) {
  expect_refused({
      {train({"--memory_budget", "12 parsecs"}), 2, "'12 parsecs'"},
      {train({"--memory_budget", "0"}), 2, "'0'"},
      {train({"--memory_budget", "-1GiB"}), 2, "'-1GiB'"},
      {train({"--memory_budget", ""}), 2, "''"},
      {train({"--memory_budget", "1KiB"}), 4, "weights"},
      {train({"--memory_budget", "40KiB", "--global_batch_size", "64"}), 4,
       "raise --memory_budget"},
      {{"plan", "--model_config", "hidden=8", "--dataset", "synthetic", "--memory_budget", "40KiB"},
       4,
       "raise --memory_budget"},
      {{"estimate", "--model", "mlp", "--memory_budget", "much"}, 2, "'much'"},
  });
}

TEST_F(BadInputTest, DataFolders) {
  write_plain(folder_ / "file", "");
  fs::create_directories(folder_ / "empty");
  expect_refused({
      {train({}, folder_ / "absent"), 3, folder_ / "absent"},
      {train({}, folder_ / "empty"), 3, kTrainImages},
      {train({}, folder_ / "file"), 3, folder_ / "file"},
  });
  write_idx_dataset(folder_ / "small", 20, false, 5, 5);
  expect_refused({train({}, folder_ / "small"), 3, "1x5x5"});
  write_idx_dataset(folder_ / "no_test", 20, false);
  fs::remove(folder_ / "no_test/" + kTestImages);
  expect_refused({train({}, folder_ / "no_test"), 3, kTestImages});
  write_idx_dataset(folder_ / "labels", 20, false);
  write_plain(folder_ / "labels/" + kTrainLabels, idx_labels(20, 11));
  expect_refused({train({}, folder_ / "labels"), 3, "label 10"});
}

TEST_F(BadInputTest, DataFiles) {
  for (const bool gzip : {false, true}) {
    const std::string ending = gzip ? ".gz" : "";
    const auto with = [&](const std::string& name, const std::string& file,
                          const std::string& bytes) {
      const std::string folder = folder_ / (name + ending);
      write_idx_dataset(folder, 20, gzip);
      const std::string path = folder + "/" + file + ending;
      gzip ? write_gzip(path, bytes) : write_plain(path, bytes);
      return train({}, folder);
    };
    expect_refused({
        {with("truncated", kTrainImages, idx_images(20).substr(0, 4000)), 3, "at byte 4000"},
        {with("nothing", kTrainLabels, ""), 3, "at byte 0"},
        {with("magic", kTrainImages, "this is no IDX file"), 3, "magic number"},
        {with("zero", kTrainImages, idx_header({0, 28, 28})), 3, "at byte 4"},
        {with("longer", kTrainLabels, idx_labels(20) + "x"), 3, "at byte 28"},
        {with("mismatch", kTrainLabels, idx_labels(19)), 3, "19 labels"},
        {with("test", kTestLabels, idx_labels(3)), 3, "3 labels"},
    });
  }
  write_idx_dataset(folder_ / "corrupt", 200, true);
  const std::string path = folder_ / "corrupt/" + kTrainImages + ".gz";
  std::string bytes = read_file(path);
  for (std::size_t i = bytes.size() / 2; i < bytes.size() / 2 + 8; ++i)
    bytes[i] = static_cast<char>(~bytes[i]);
  write_plain(path, bytes);
  expect_refused({train({}, folder_ / "corrupt"), 3, path});
  write_plain(path, bytes.substr(0, bytes.size() / 3));
  expect_refused({train({}, folder_ / "corrupt"), 3, path});
}

TEST_F(BadInputTest, ATokenizerWithoutText) {
  write_plain(folder_ / "tokens.bin", "abcd");
  write_plain(folder_ / "some.model", "");
  const std::vector<std::string> tokenizer = {"--tokenizer", folder_ / "some.model"};
  fs::create_directories(folder_ / "images");
  expect_refused({
      {train(tokenizer), 2, "--tokenizer"},
      {train(tokenizer, "fashion-mnist"), 2, "--tokenizer"},
      {train(tokenizer, folder_ / "images"), 2, "--tokenizer"},
      {train(tokenizer, folder_ / "tokens.bin"), 2, "--tokenizer"},
  });
}

TEST_F(BadInputTest, Reports) {
  ASSERT_EQ(run_program(train({"--max_steps", "2", "--logging_steps", "1"}), folder_).exit_code, 0);
  fs::create_directories(folder_ / "empty");
  write_plain(folder_ / "file", "");
  expect_refused({
      {{"report"}, 2, "DIR"},
      {{"report", folder_ / "absent"}, 3, folder_ / "absent"},
      {{"report", folder_ / "file"}, 3, folder_ / "file"},
      {{"report", folder_ / "empty"}, 3, "train_results.json"},
      {{"report", folder_ / "out", "--outptu", "x"}, 2, "--output"},
      {{"report", folder_ / "out", "--output", folder_ / "file/page.html"}, 2, "page.html"},
  });
  for (const char* name : {"metrics.jsonl", "plan.json", "train_results.json"}) {
    const std::string path = folder_ / (std::string("out/") + name), whole = read_file(path);
    write_plain(path, whole.substr(0, whole.size() - 3));
    expect_refused({{"report", folder_ / "out"}, 3, name});
    write_plain(path, whole);
  }
  EXPECT_EQ(run_program({"report", folder_ / "out"}, folder_).exit_code, 0);
}

TEST_F(BadInputTest, OutputFoldersThatCannotBeWritten) {
  write_plain(folder_ / "file", "kept");
  const auto into = [&](const std::string& output) {
    return std::vector<std::string>{"train",     "--model_config", "hidden=8",
                                    "--dataset", "synthetic",      "--max_steps",
                                    "1",         "--output_dir",   output};
  };
  expect_refused({
      {into(folder_ / "file"), 2, folder_ / "file"},
      {into(folder_ / "file/below"), 2, folder_ / "file/below"},
      {into("/proc/headroom/out"), 2, "/proc/headroom/out"},
      {into(""), 2, "output_dir"},
  });
  EXPECT_EQ(read_file(folder_ / "file"), "kept");
}

TEST_F(BadInputTest, Chains) {
  write_plain(folder_ / "no.json", "{");
  write_plain(folder_ / "unknown.json",
              R"({"stages": [{"name": "a", "outputbytes": 1, "options": [{}]}]})");
  write_plain(folder_ / "negative.json",
              R"({"stages": [{"name": "a", "output_bytes": -1, "options": [{}]}]})");
  expect_refused({
      {{"plan", "--chain", folder_ / "absent.json", "--memory_budget", "1"},
       3,
       folder_ / "absent.json"},
      {{"plan", "--chain", folder_ / "no.json", "--memory_budget", "1"}, 2, "no.json"},
      {{"plan", "--chain", folder_ / "unknown.json", "--memory_budget", "1"}, 2, "output_bytes"},
      {{"plan", "--chain", folder_ / "negative.json", "--memory_budget", "1"}, 2, "-1"},
  });
}

TEST_F(BadInputTest, Snapshots) {
  const std::vector<std::string> good = {"--max_steps", "4", "--save_steps", "2", "--disable_tqdm"};
  const auto resumed = [&](std::vector<std::string> more) {
    std::vector<std::string> words = train(good);
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused({resumed({"--resume_from_checkpoint"}), 5, "no snapshot"});
  const Outcome outcome = run_program(train(good), folder_);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  ASSERT_TRUE(fs::is_directory(folder_ / "out/snapshot-2"));

  // One after the other: an output folder belongs to one run at a time.
  for (const BadInput& bad : std::vector<BadInput>{
           {resumed({"--resume_from_checkpoint", folder_ / "absent"}), 5, folder_ / "absent"},
           {resumed({"--resume_from_checkpoint", "last", "--seed", "7"}), 5, "seed"},
           {resumed({"--resume_from_checkpoint", "last", "--optim", "sgd"}), 5, "optim"},
           {resumed({"--resume_from_checkpoint", "last", "--per_device_train_batch_size", "16"}), 5,
            "16"},
           {resumed({"--resume_from_checkpoint", "last", "--shuffle", "false"}), 5, "shuffle"},
       })
    expect_refused(bad);

  // By its name a broken snapshot is refused; "last" takes the one before it.
  const std::string fourth = folder_ / "out/snapshot-4", weights = fourth + "/model.safetensors";
  const std::string bytes = read_file(weights);
  std::string flipped = bytes;
  flipped[bytes.size() / 2] = static_cast<char>(flipped[bytes.size() / 2] ^ 1);
  write_plain(weights, flipped);
  expect_refused({resumed({"--resume_from_checkpoint", fourth}), 5, weights});
  write_plain(weights, bytes.substr(0, bytes.size() / 2));
  expect_refused({resumed({"--resume_from_checkpoint", fourth}), 5, weights});
  fs::remove(weights);
  expect_refused({resumed({"--resume_from_checkpoint", fourth}), 5, weights});
  fs::remove(fourth + "/checksums.sha256");
  expect_refused({resumed({"--resume_from_checkpoint", fourth}), 5, "checksums.sha256"});
  const Outcome last = run_program(resumed({"--resume_from_checkpoint"}), folder_);
  EXPECT_EQ(last.exit_code, 0);
  EXPECT_NE(last.err.find("skipping a broken snapshot"), std::string::npos) << last.err;
}

// What is no file, or too much of one, wherever a file is read.
TEST_F(BadInputTest, PathsThatAreNoFiles) {
  ASSERT_EQ(
      run_program(train({"--max_steps", "2", "--logging_steps", "1", "--save_steps", "1"}), folder_)
          .exit_code,
      0);
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  fs::create_symlink(folder_ / "loop", folder_ / "loop");
  write_plain(folder_ / "deep.json", std::string(1000000, '['));
  write_plain(folder_ / "large.json", "");
  fs::resize_file(folder_ / "large.json", std::uintmax_t{1} << 40);
  write_plain(folder_ / "text.txt", std::string(5000, 'x'));
  const std::string gpt = "n_layer=1,n_head=1,n_embd=8,block_size=8,vocab_size=300";
  std::vector<BadInput> bad;
  for (const std::string& path :
       {std::string("/dev/zero"), folder_ / "pipe", folder_ / "loop", folder_ / "absent",
        std::string(5000, 'x'), folder_ / "two\nlines"}) {
    bad.push_back({train({"--config", path}), 2, ""});
    bad.push_back({train({}, path), 3, ""});
    bad.push_back({train({"--resume_from_checkpoint", path}), 5, ""});
    bad.push_back({{"plan", "--chain", path, "--memory_budget", "1"}, 3, ""});
    bad.push_back({{"report", path}, 3, ""});
    bad.push_back({{"train", "--model", "gpt", "--model_config", gpt, "--dataset",
                    folder_ / "text.txt", "--tokenizer", path, "--output_dir", folder_ / "out"},
                   3,
                   ""});
  }
  bad.push_back({train({"--config", folder_.path()}), 2, "is a folder"});
  for (const char* name : {"deep.json", "large.json"}) {
    bad.push_back({train({"--config", folder_ / name}), 2, name});
    bad.push_back({{"plan", "--chain", folder_ / name, "--memory_budget", "1"}, 3, name});
  }
  expect_refused(bad);
  for (const char* name :
       {"metrics.jsonl", "plan.json", "train_results.json", "training_args.json"}) {
    const std::string path = folder_ / (std::string("out/") + name), whole = read_file(path);
    for (const std::string& target : {std::string("/dev/zero"), folder_ / "pipe",
                                      folder_ / "deep.json", folder_ / "large.json"}) {
      fs::remove(path);
      fs::create_symlink(target, path);
      check({{"report", folder_ / "out"}, 3, name},
            run_program({"report", folder_ / "out"}, folder_));
    }
    fs::remove(path);
    write_plain(path, whole);
  }
  for (const char* name :
       {"model.safetensors", "optimizer.pt", "position.txt", "checksums.sha256"}) {
    const std::string path = folder_ / (std::string("out/snapshot-2/") + name),
                      whole = read_file(path);
    for (const std::string& target : {std::string("/dev/zero"), folder_ / "pipe"}) {
      fs::remove(path);
      fs::create_symlink(target, path);
      const auto words = train({"--resume_from_checkpoint", folder_ / "out/snapshot-2"});
      check({words, 5, name}, run_program(words, folder_));
    }
    fs::remove(path);
    write_plain(path, whole);
  }
}

}  // namespace
}  // namespace headroom::testing
