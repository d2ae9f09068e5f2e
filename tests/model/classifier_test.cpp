// Classifiers of texts: padding counts for nothing, names are Hugging Face's, heads can be changed.
#include "model/classifier.h"
#include "data/text_samples.h"
#include "model/published.h"

#include <headroom/core/error.h>
#include <headroom/model/pretrained.h>
#include <headroom/model/safetensors.h>

#include "model/chain_runs.h"
#include "support/idx_files.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

namespace headroom {
namespace {

using testing::loss_of;
using testing::run_chain;
using testing::take_gradients;
using testing::TemporaryFolder;

struct Family {
  const char* name;
  const char* sizes;
  const char* architecture;
  std::vector<const char*> head_names;  // in model.safetensors
};
const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"bert",
       "num_hidden_layers=2,num_attention_heads=2,hidden_size=20,intermediate_size=36,"
       "max_position_embeddings=14,vocab_size=31",
       "BertForSequenceClassification",
       {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight",
        "classifier.bias"}},
      {"gpt",
       "n_layer=2,n_head=2,n_embd=20,block_size=14,vocab_size=31",
       "GPT2ForSequenceClassification",
       {"score.weight"}},
      {"llama",
       "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,hidden_size=24,"
       "intermediate_size=36,max_position_embeddings=14,vocab_size=31",
       "LlamaForSequenceClassification",
       {"score.weight"}}};
  return all;
}

ZooModel make(const Family& family, const std::string& more = ",num_labels=3") {
  torch::manual_seed(1);
  return make_model(family.name, family.sizes + more);
}

// Texts of 1 to 12 tokens.
std::unique_ptr<Dataset> make_texts(const ModelInput& input) {
  TokenLists texts;
  std::vector<std::int64_t> classes, tokens;
  for (std::int64_t i = 0; i < 5; ++i) {
    tokens.clear();
    for (std::int64_t t = 0; t < 1 + (i * 5) % 13; ++t) tokens.push_back((7 * i + 3 * t) % 31);
    texts.add(tokens);
    classes.push_back(i % 3);
  }
  return make_labelled_texts(std::move(texts), std::move(classes), 0, input.sees_all_tokens);
}

TEST(Classifiers, PaddedTextsHaveTheGradientsOfTextsOneByOne) {
  for (const Family& family : families()) {
    const ZooModel model = make(family);
    ASSERT_EQ(model.input.kind, ModelInput::Kind::kTexts);
    const auto texts = make_texts(model.input);
    const at::Tensor together = loss_of(model.chain, texts->load({0, 1, 2, 3, 4}));
    together.backward();
    const std::vector<at::Tensor> padded = take_gradients(model.chain);
    double sum = 0.0;
    for (std::int64_t i = 0; i < 5; ++i) {
      const at::Tensor loss = loss_of(model.chain, texts->load({i}));
      loss.backward();
      sum += loss.item<double>();
    }
    EXPECT_NEAR(together.item<double>(), sum, 1e-5) << family.name;
    const std::vector<at::Tensor> alone = take_gradients(model.chain);
    for (std::size_t i = 0; i < padded.size(); ++i) {
      if (!padded[i].defined()) continue;
      const double largest = std::max(1.0, alone[i].abs().max().item<double>());
      EXPECT_LT((padded[i] - alone[i]).abs().max().item<double>() / largest, 1e-6)
          << family.name << " " << model.chain.named_parameters()[i].first;
    }
  }
}

TEST(Classifiers, SayWhatTheyChoseWhenTheyAreEvaluated) {
  for (const Family& family : families()) {
    const ZooModel model = make(family);
    model.chain.train(false);
    const auto texts = make_texts(model.input);
    const MicroBatch micro = texts->load({0, 1, 2, 3, 4});
    const std::vector<at::Tensor> results = run_chain(model.chain, micro);
    ASSERT_EQ(results.size(), 3U) << family.name;
    EXPECT_EQ(results[2].eq(micro.targets[0]).sum().item<std::int64_t>(),
              results[1].item<std::int64_t>());
  }
}

TEST(Classifiers, AreSavedUnderHuggingFacesNamesWithTheirClasses) {
  for (const Family& family : families()) {
    const TemporaryFolder folder;
    ZooModel model = make(family);
    set_label_names(model.chain, {"bad", "so so", "good"}, 5);
    save_pretrained(model.chain, folder.path().string());
    const auto config = nlohmann::json::parse(testing::read_file(folder / "config.json"));
    EXPECT_EQ(config["architectures"][0], family.architecture);
    if (std::string(family.name) == "bert") {
      EXPECT_EQ(config["hidden_act"], "gelu");
      EXPECT_EQ(config["position_embedding_type"], "absolute");
    }
    EXPECT_EQ(config["id2label"]["1"], "so so");
    EXPECT_EQ(config["label2id"]["good"], 2);
    EXPECT_EQ(config["pad_token_id"], 5);
    EXPECT_EQ(label_names_of(folder.path().string())[0], "bad");
    const SafetensorsReader reader(folder.path().string());
    for (const char* name : family.head_names) EXPECT_NE(reader.find(name), nullptr) << name;
    const ZooModel again = load_pretrained(folder.path().string());
    EXPECT_EQ(again.input.kind, ModelInput::Kind::kTexts);
    const auto texts = make_texts(model.input);
    EXPECT_EQ(loss_of(again.chain, texts->load({0, 3})).item<float>(),
              loss_of(model.chain, texts->load({0, 3})).item<float>());
  }
}

TEST(Classifiers, AreMadeFromLanguageModelsAndOfOtherClasses) {
  for (const Family& family : families()) {
    const TemporaryFolder folder;
    save_pretrained(make(family, "").chain, folder / "lm");
    EXPECT_EQ(load_pretrained(folder / "lm").input.kind, ModelInput::Kind::kTokens);
    const ModelHead four{ModelHead::Kind::kClassifier, 4};
    const ZooModel classifier = load_pretrained(folder / "lm", four);
    EXPECT_EQ(classifier.input.num_classes, 4) << family.name;
    // The body is the language model's.
    const auto before = load_safetensors(folder / "lm");
    save_pretrained(classifier.chain, folder / "classifier");
    const auto after = load_safetensors(folder / "classifier");
    std::int64_t num_same = 0;
    for (const auto& [name, tensor] : after) {
      const auto found = before.find(name);
      if (found == before.end()) continue;
      EXPECT_TRUE(torch::equal(found->second, tensor)) << name;
      ++num_same;
    }
    EXPECT_GT(num_same, 10) << family.name;
    const ZooModel two = load_pretrained(folder / "classifier", {ModelHead::Kind::kClassifier, 2});
    EXPECT_EQ(two.input.num_classes, 2);
    const ZooModel back =
        load_pretrained(folder / "classifier", {ModelHead::Kind::kLanguageModel, 0});
    EXPECT_EQ(back.input.kind, ModelInput::Kind::kTokens) << family.name;
  }
}

TEST(Packing, GivesTheGradientsOfTextsOneByOne) {
  for (const std::size_t family : {1, 2}) {
    const ZooModel model = make(families()[family], "");
    const auto lists = [] {
      TokenLists texts;
      for (const std::int64_t length : {3, 9, 2, 5, 6}) {
        std::vector<std::int64_t> tokens;
        for (std::int64_t t = 0; t < length; ++t) tokens.push_back((5 * length + 3 * t) % 31);
        texts.add(tokens);
      }
      return texts;
    };
    const auto packed = make_packed_documents(lists(), 14, 0);
    const auto alone = make_documents(lists(), 0);
    ASSERT_EQ(packed->size(), 2);
    loss_of(model.chain, packed->load({0, 1})).backward();
    const std::vector<at::Tensor> together = take_gradients(model.chain);
    for (std::int64_t i = 0; i < alone->size(); ++i)
      loss_of(model.chain, alone->load({i})).backward();
    const std::vector<at::Tensor> one_by_one = take_gradients(model.chain);
    for (std::size_t i = 0; i < together.size(); ++i) {
      const double largest = std::max(1.0, one_by_one[i].abs().max().item<double>());
      EXPECT_LT((together[i] - one_by_one[i]).abs().max().item<double>() / largest, 1e-6)
          << families()[family].name << " " << model.chain.named_parameters()[i].first;
    }
  }
}

// The dense layer belongs to both heads.
TEST(Classifiers, HaveAClassifierInsteadOfAVocabulary) {
  EXPECT_EQ(
      make_model("bert", std::string(families()[0].sizes) + ",num_labels=2").chain.num_parameters(),
      make_model("bert", families()[0].sizes).chain.num_parameters() - 2 * 20 - 31 + 21 * 2);
}

}  // namespace
}  // namespace headroom
