// A model that was trained briefly on plenty of data without the labels in question is better at a
// task with few samples than random weights are: from the command line, files in, accuracy out.
#include "apps/program.h"
#include "support/image_files.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <random>

namespace headroom::testing {
namespace {

const std::vector<std::string> kSeeds = {"1", "2", "3"};

class TransferTest : public ::testing::Test {
 protected:
  nlohmann::json train(const std::string& output, const std::string& seed,
                       std::vector<std::string> words) const {
    words.insert(words.begin(), "train");
    words.insert(words.end(), {"--output_dir", folder_ / output, "--seed", seed, "--disable_tqdm"});
    const Outcome outcome = run_program(words, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.exit_code == 0
               ? nlohmann::json::parse(read_file(folder_ / (output + "/train_results.json")))
               : nlohmann::json();
  }

  TemporaryFolder folder_;
};

std::vector<std::string> joined(std::vector<std::string> words,
                                const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const std::string kFirst = "abcdefghijklm", kSecond = "nopqrstuvwxyz";

std::string some_of(const std::string& letters, int count, std::mt19937& random) {
  std::string text;
  for (int i = 0; i < count; ++i) text += letters[random() % letters.size()];
  return text;
}

// Letters of one half of the alphabet or the other; which, is the label.
std::string labelled(int count, const std::string& first, const std::string& second,
                     std::mt19937& random) {
  std::string rows = "text,label\n";
  for (int i = 0; i < count; ++i) {
    const bool is_first = random() % 2 == 0;
    rows += some_of(is_first ? first : second, 12, random) + (is_first ? ",first\n" : ",second\n");
  }
  return rows;
}

// The text without labels shows which letters occur together; the few labelled lines show only
// five of each half, and the evaluated ones only the others. What is known of those can come from
// the text alone.
TEST_F(TransferTest, ABertThatReadTextKnowsWordsThatNoLabelShowed) {
  std::mt19937 random(1);
  std::string text;
  for (int i = 0; i < 600; ++i)
    text +=
        some_of(random() % 2 == 0 ? kFirst : kSecond, 40 + static_cast<int>(random() % 40), random);
  write_plain(folder_ / "text.txt", text);
  write_plain(folder_ / "few.csv", labelled(80, kFirst.substr(0, 5), kSecond.substr(0, 5), random));
  write_plain(folder_ / "others.csv", labelled(2000, kFirst.substr(5), kSecond.substr(5), random));
  const std::vector<std::string> bert = {
      "--model", "bert", "--model_config",
      "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128,"
      "max_position_embeddings=32,dropout=0"};
  const std::vector<std::string> task = {
      "--dataset", folder_ / "few.csv", "--task", "text-classification", "--num_train_epochs",
      "3",         "--learning_rate",   "1e-3"};
  const auto accuracy = [&](const std::string& model) {
    const Outcome outcome = run_program(
        {"evaluate", folder_ / model, "--dataset", folder_ / "others.csv", "--json"}, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out)["eval_accuracy"].get<double>();
  };
  double sum_of_random = 0;
  for (const std::string& seed : kSeeds) {
    train("read", seed,
          joined(bert, {"--dataset", folder_ / "text.txt", "--max_steps", "300", "--learning_rate",
                        "2e-3", "--per_device_train_batch_size", "16"}));
    train("tuned", seed, joined(task, {"--model_name_or_path", folder_ / "read"}));
    train("random", seed, joined(task, bert));
    EXPECT_GE(accuracy("tuned"), 0.95) << "seed " << seed;
    sum_of_random += accuracy("random");
  }
  EXPECT_LE(sum_of_random / static_cast<double>(kSeeds.size()), 0.75);
}

// Noisy waves of random length, height and place that run down (0), across (1) or along one of the
// diagonals (2, 3).
std::vector<std::uint8_t> waves(int kind, std::mt19937& random) {
  std::uniform_real_distribution<double> share(0.0, 1.0);
  std::normal_distribution<double> noise(0.0, 30.0);
  const double rate = 0.6 + share(random), phase = 6.28 * share(random),
               height = 40 + 60 * share(random);
  std::vector<std::uint8_t> values;
  for (int y = 0; y < 16; ++y) {
    for (int x = 0; x < 16; ++x) {
      const int place = kind == 0 ? y : kind == 1 ? x : kind == 2 ? x + y : x - y;
      const double value = 128 + height * std::sin(rate * place + phase) + noise(random);
      values.push_back(static_cast<std::uint8_t>(std::min(255.0, std::max(0.0, value))));
    }
  }
  return values;
}

TEST_F(TransferTest, AVitThatSawFourClassesLearnsTwoOthersFromTwentyFourImages) {
  std::mt19937 random(2);
  const auto write = [&](const std::string& folder, const std::vector<std::string>& classes,
                         int count) {
    for (int i = 0; i < count; ++i) {
      const int kind = i % static_cast<int>(classes.size());
      write_png(folder_ / (folder + "/" + classes[static_cast<std::size_t>(kind)] + "/" +
                           std::to_string(i) + ".png"),
                16, 16, 1, waves(kind, random));
    }
  };
  write("many", {"down", "across", "rising", "falling"}, 1200);
  write("few/train", {"lines", "posts"}, 24);
  write("few/val", {"lines", "posts"}, 200);
  const std::vector<std::string> vit = {
      "--model", "vit", "--model_config",
      "channels=1,image_size=16,patch_size=4,hidden_size=32,num_attention_heads=2,"
      "num_hidden_layers=2,intermediate_size=64"};
  const std::vector<std::string> task = {"--dataset",
                                         folder_ / "few",
                                         "--per_device_train_batch_size",
                                         "4",
                                         "--num_train_epochs",
                                         "4",
                                         "--learning_rate",
                                         "2e-3"};
  for (const std::string& seed : kSeeds) {
    train("seen", seed,
          joined(vit, {"--dataset", folder_ / "many", "--num_train_epochs", "12", "--learning_rate",
                       "2e-3", "--per_device_train_batch_size", "16"}));
    const nlohmann::json tuned =
        train("tuned", seed, joined(task, {"--model_name_or_path", folder_ / "seen"}));
    const nlohmann::json random_start = train("random", seed, joined(task, vit));
    EXPECT_GE(tuned["eval_accuracy"], 0.8) << "seed " << seed;
    EXPECT_LE(random_start["eval_accuracy"], 0.7) << "seed " << seed;
  }
}

}  // namespace
}  // namespace headroom::testing
