// Fine-tuning from the command line: files in, a model that learned out.
#include "apps/program.h"
#include "support/image_files.h"
#include "support/sanitizer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/resource.h>

namespace headroom::testing {
namespace {

class FinetuneTest : public ::testing::Test {
 protected:
  nlohmann::json train(const std::string& output, std::vector<std::string> words,
                       const std::function<void()>& prepare = {}) {
    words.insert(words.begin(), "train");
    for (const std::string& word :
         {std::string("--output_dir"), folder_ / output, std::string("--disable_tqdm")})
      words.push_back(word);
    const Outcome outcome = Program(words, folder_, {}, prepare).wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    log_ = outcome.err;
    return outcome.exit_code == 0
               ? nlohmann::json::parse(read_file(folder_ / (output + "/train_results.json")))
               : nlohmann::json();
  }
  nlohmann::json evaluate(const std::string& model, const std::string& dataset) const {
    const Outcome outcome =
        run_program({"evaluate", folder_ / model, "--dataset", dataset, "--json"}, folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.exit_code == 0 ? nlohmann::json::parse(outcome.out) : nlohmann::json();
  }
  nlohmann::json config(const std::string& model) const {
    return nlohmann::json::parse(read_file(folder_ / (model + "/config.json")));
  }

  TemporaryFolder folder_;
  std::string log_;
};

const char* const kBert =
    "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,"
    "max_position_embeddings=32";

// Sentences about two things, in random order.
std::string reviews(int count) {
  const std::vector<std::string> good = {"lovely", "great", "a joy", "superb"},
                                 bad = {"awful", "poor", "a bore", "dreadful"};
  std::string text = "id,review,stars\n";
  for (int i = 0; i < count; ++i) {
    const bool is_good = (i * 7 + i / 3) % 2 == 0;
    const std::string& word = (is_good ? good : bad)[static_cast<std::size_t>(i * 5 / 2) % 4];
    text += std::to_string(i) + ",\"it was " + word + ", no. " + std::to_string(i % 9) + "\"," +
            (is_good ? "good" : "bad") + "\n";
  }
  return text;
}

TEST_F(FinetuneTest, ATextClassifierFromASavedBertLearnsAndKeepsItsBestModel) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += "it was lovely, it was awful, no. " + std::to_string(i);
  write_plain(folder_ / "text.txt", text);
  train("bert", {"--model", "bert", "--model_config", kBert, "--dataset", folder_ / "text.txt",
                 "--max_steps", "20", "--learning_rate", "2e-3"});
  EXPECT_EQ(config("bert")["architectures"][0], "BertForMaskedLM");
  write_plain(folder_ / "reviews.csv", reviews(300));
  const std::vector<std::string> flags = {"--dataset",
                                          folder_ / "reviews.csv",
                                          "--text_column",
                                          "review",
                                          "--label_column",
                                          "stars",
                                          "--task",
                                          "text-classification",
                                          "--learning_rate",
                                          "3e-3",
                                          "--eval_strategy",
                                          "epoch",
                                          "--load_best_model_at_end",
                                          "true",
                                          "--metric_for_best_model",
                                          "f1",
                                          "--per_device_train_batch_size",
                                          "16",
                                          "--group_by_length",
                                          "true"};
  std::vector<std::string> from_bert = flags, from_reviews = flags, from_nothing = flags;
  from_bert.insert(from_bert.end(),
                   {"--model_name_or_path", folder_ / "bert", "--num_train_epochs", "6"});
  const nlohmann::json results = train("reviews", from_bert);
  EXPECT_NE(log_.find("initialised at random"), std::string::npos) << log_;
  EXPECT_GE(results["eval_accuracy"], 0.95);
  EXPECT_GE(results["eval_f1"], 0.95);
  const nlohmann::json saved = config("reviews");
  EXPECT_EQ(saved["architectures"][0], "BertForSequenceClassification");
  EXPECT_EQ(saved["id2label"]["0"], "bad");
  EXPECT_EQ(saved["label2id"]["good"], 1);
  const auto state = nlohmann::json::parse(read_file(folder_ / "reviews/trainer_state.json"));
  EXPECT_EQ(state["best_metric"], results["eval_f1"]);
  // What was learned is kept, the head as well: from random weights one epoch is not enough.
  from_reviews.insert(from_reviews.end(),
                      {"--model_name_or_path", folder_ / "reviews", "--num_train_epochs", "1"});
  from_nothing.insert(from_nothing.end(),
                      {"--model", "bert", "--model_config", kBert, "--num_train_epochs", "1"});
  const nlohmann::json more = train("more", from_reviews), random = train("random", from_nothing);
  EXPECT_GE(more["eval_accuracy"], 0.95);
  EXPECT_LT(random["eval_accuracy"], 0.95);
  EXPECT_LT(more["train_loss"], random["train_loss"].get<double>() / 2);

  const nlohmann::json again = [&] {
    const Outcome outcome = run_program(
        {"evaluate", folder_ / "reviews", "--dataset", folder_ / "reviews.csv", "--text_column",
         "review", "--label_column", "stars", "--json", "--per_device_train_batch_size", "16"},
        folder_);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  }();
  EXPECT_EQ(again["eval_loss"], results["eval_loss"]) << "the same tenth, the best weights";
}

TEST_F(FinetuneTest, AnImageClassifierLearnsFromAFolderWithWorkers) {
  for (int i = 0; i < 120; ++i) {
    const bool is_dark = i % 2 == 0;
    std::vector<std::uint8_t> values = shaded(20, 24, 3, is_dark ? 20 + i % 50 : 130 + i % 50);
    const std::string path =
        folder_ / ("photos/" + std::string(is_dark ? "night" : "day") + "/" + std::to_string(i));
    i % 3 == 0 ? write_jpeg(path + ".jpg", 20, 24, 3, values)
               : write_png(path + ".png", 20, 24, 3, values);
  }
  const std::vector<std::string> flags = {
      "--model",
      "vit",
      "--model_config",
      "channels=3,image_size=16,patch_size=8,hidden_size=16,num_attention_heads=2,"
      "num_hidden_layers=1,intermediate_size=32",
      "--dataset",
      folder_ / "photos",
      "--num_train_epochs",
      "6",
      "--learning_rate",
      "5e-3"};
  const nlohmann::json alone = train("vit", flags);
  EXPECT_GE(alone["eval_accuracy"], 0.9);
  EXPECT_EQ(config("vit")["id2label"]["1"], "night");
  std::vector<std::string> with_workers = flags;
  with_workers.insert(with_workers.end(), {"--dataloader_num_workers", "2"});
  const nlohmann::json helped = train("helped", with_workers);
  EXPECT_EQ(helped["weights_sha256"], alone["weights_sha256"]);
  EXPECT_EQ(evaluate("vit", folder_ / "photos")["eval_loss"], alone["eval_loss"]);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "vit/preprocessor_config.json"));
}

TEST_F(FinetuneTest, ArraysAreTheSameInBothKindsOfFiles) {
  constexpr std::size_t kSamples = 12, kPixels = 784;
  std::string images, classes;
  for (std::size_t i = 0; i < kSamples * kPixels; ++i) images += static_cast<char>(i * i % 251);
  for (std::size_t i = 0; i < kSamples; ++i) classes += static_cast<char>(i % 3);
  const auto npy = [](const std::string& shape, const std::string& bytes) {
    std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': " + shape + ", }";
    header.resize(118, ' ');
    return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + bytes;
  };
  std::filesystem::create_directories(folder_ / "arrays");
  write_plain(folder_ / "arrays/inputs.npy", npy("(12, 1, 28, 28)", images));
  write_plain(folder_ / "arrays/targets.npy", npy("(12,)", classes));
  const std::size_t end = images.size() + classes.size();
  const std::string header =
      nlohmann::json{
          {"inputs",
           {{"dtype", "U8"}, {"shape", {12, 1, 28, 28}}, {"data_offsets", {0, images.size()}}}},
          {"targets", {{"dtype", "U8"}, {"shape", {12}}, {"data_offsets", {images.size(), end}}}}}
          .dump();
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  write_plain(folder_ / "arrays.safetensors", length + header + images + classes);
  const auto hash = [&](const std::string& output, const std::string& dataset) {
    return train(output, {"--model", "mlp", "--model_config", "hidden=8", "--dataset",
                          folder_ / dataset, "--max_steps", "3"})["weights_sha256"];
  };
  EXPECT_EQ(hash("npy", "arrays"), hash("safetensors", "arrays.safetensors"));
}

TEST_F(FinetuneTest, TasksAndModelsMustFit) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& part) {
    std::vector<std::string> words = {"train", "--dataset", "synthetic", "--output_dir",
                                      folder_ / "out"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(words, folder_);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
  };
  refused({"--model", "gpt", "--task", "masked-lm"}, "--model gpt is for causal-lm");
  refused({"--model", "mlp", "--task", "text-classification"}, "is for image-classification");
  refused({"--model", "clip", "--task", "text-classification"}, "does not classify");
  refused({"--task", "regression"}, "did you mean");
  refused({"--load_best_model_at_end"}, "--eval_strategy");
}

TEST_F(FinetuneTest, PairsWithTextsOfOtherLengthsThanTheFirstHaveAPlan) {
  std::filesystem::create_directories(folder_ / "pairs");
  for (int i = 0; i < 8; ++i) {
    const std::string path = folder_ / ("pairs/" + std::to_string(i));
    write_png(path + ".png", 28, 28, 1, shaded(28, 28, 1, 20 * i));
    write_plain(path + ".txt", std::string(static_cast<std::size_t>(1 + 3 * (i % 4)), 'a'));
  }
  std::vector<std::string> flags = {
      "--model",
      "clip",
      "--model_config",
      "vision_num_hidden_layers=1,text_num_hidden_layers=1,vision_hidden_size=32,"
      "text_hidden_size=32,patch_size=14,length=16",
      "--dataset",
      folder_ / "pairs",
      "--max_steps",
      "2",
      "--global_batch_size",
      "8",
      "--shuffle",
      "false",
      "--per_device_train_batch_size",
      "4"};
  const nlohmann::json plain = train("plain", flags);
  flags.insert(flags.end(), {"--memory_budget", "100MiB"});
  const nlohmann::json planned = train("planned", flags);
  ASSERT_TRUE(planned.is_object());
  EXPECT_EQ(planned["weights_sha256"], plain["weights_sha256"]);
  EXPECT_LE(planned["peak_memory_bytes"], planned["predicted_peak_bytes"]);
}

TEST_F(FinetuneTest, TheBudgetOfALimitedProcessIsChosenAndKept) {
  if (kHasSanitizer) GTEST_SKIP() << "a sanitizer takes more addresses than the limit";
  constexpr std::int64_t kLimit = std::int64_t{3} << 30;
  const nlohmann::json results =
      train("auto",
            {"--model", "gpt", "--model_config", "n_layer=2,n_head=2,n_embd=32,block_size=32",
             "--dataset", "synthetic", "--max_steps", "2", "--global_batch_size", "8",
             "--memory_budget", "auto"},
            [] {
              rlimit limit{static_cast<rlim_t>(kLimit), static_cast<rlim_t>(kLimit)};
              ::setrlimit(RLIMIT_AS, &limit);
            });
  EXPECT_NE(log_.find("memory budget: "), std::string::npos) << log_;
  EXPECT_NE(log_.find("RLIMIT_AS"), std::string::npos) << log_;
  EXPECT_LT(results["memory_budget_bytes"], kLimit);
  EXPECT_GT(results["memory_budget_bytes"], 0);
  EXPECT_LE(results["peak_memory_bytes"], results["memory_budget_bytes"]);
}

}  // namespace
}  // namespace headroom::testing
