#include "model/bert.h"

#include <headroom/core/error.h>
#include <headroom/ops/transformer.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/rows_at.h"

#include "model/classifier.h"
#include "model/family.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace headroom {
namespace {

constexpr double kNormEps = 1e-12;

const Presets<BertConfig>& bert_presets() {
  static const Presets<BertConfig> all = [] {
    const auto sized = [](std::int64_t width, std::int64_t layers, std::int64_t heads) {
      BertConfig config;
      config.hidden_size = width;
      config.num_hidden_layers = layers;
      config.num_attention_heads = heads;
      config.intermediate_size = 4 * width;
      return config;
    };
    const auto published = [&](std::int64_t width, std::int64_t layers, std::int64_t heads) {
      BertConfig config = sized(width, layers, heads);
      config.max_position_embeddings = 512;
      config.vocab_size = 30522;
      config.mask_token = 103;
      config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1;
      return config;
    };
    return Presets<BertConfig>{{"bert", sized(384, 6, 6)},
                               {"bert-base", published(768, 12, 12)},
                               {"bert-large", published(1024, 24, 16)}};
  }();
  return all;
}

class BertEmbedding final : public Stage {
 public:
  explicit BertEmbedding(const BertConfig& config)
      : Stage("embedding"),
        dropout_(config.hidden_dropout_prob),
        words_(module_->add("word_embeddings",
                            Weights(normal({config.vocab_size, config.hidden_size}), 0))),
        positions_(
            module_->add("position_embeddings",
                         Weights(normal({config.max_position_embeddings, config.hidden_size}), 0))),
        types_(module_->add("token_type_embeddings",
                            Weights(normal({config.type_vocab_size, config.hidden_size}), 0))),
        norm_(module_->add("LayerNorm", make_norm(config.hidden_size))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    const at::Tensor& tokens = inputs.at(0);  // (B, T)
    const std::int64_t length = tokens.size(1), most = positions_->weight.size(0);
    if (length > most) {
      throw ConfigError(
          fmt::format("{} tokens in a row, but the model has {} positions: cut the text or raise "
                      "max_position_embeddings",
                      length, most));
    }
    // Every token has the same type, so that it is added to the positions, which are few.
    const at::Tensor places =
        positions_->weight.narrow(0, 0, length) + types_->weight.narrow(0, 0, 1);  // (T, C)
    const at::Tensor x = layer_norm(token_position_embedding(tokens, words_->weight, places),
                                    norm_->weight, norm_->bias, kNormEps);
    return {dropout(x, module_->is_training() ? dropout_ : 0.0)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }
  const Weights& words() const { return words_; }

 private:
  double dropout_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights words_, positions_, types_, norm_;
};

class BertHead final : public Stage {
 public:
  BertHead(const BertConfig& config, const Weights& words)
      : Stage("head"), words_(module_->add("decoder", words)) {
    const auto transform = module_->add("transform", std::make_shared<GroupModule>());
    dense_ = transform->add("dense", make_linear(config.hidden_size, config.hidden_size));
    norm_ = transform->add("LayerNorm", make_norm(config.hidden_size));
    bias_ = module_->add_parameter("bias", torch::zeros({config.vocab_size}));
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor chosen = rows_at(inputs.at(0), micro.targets.at(1));  // (B * K, C)
    const at::Tensor hidden = layer_norm(at::gelu(linear(chosen, dense_->weight, dense_->bias)),
                                         norm_->weight, norm_->bias, kNormEps);
    CrossEntropyOptions options;
    options.reduction = CrossEntropyOptions::Reduction::kSum;
    options.bias = bias_;
    return {linear_cross_entropy(hidden, words_->weight, micro.targets[0].reshape({-1}), options)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights words_, dense_{nullptr}, norm_{nullptr};
  at::Tensor bias_;
};

class BertClassifier final : public Stage {
 public:
  explicit BertClassifier(const BertConfig& config)
      : Stage("head"),
        dropout_(config.classifier_dropout),
        pooler_(module_->add("pooler", std::make_shared<GroupModule>())
                    ->add("dense", make_linear(config.hidden_size, config.hidden_size))),
        classifier_(
            module_->add("classifier", make_linear(config.hidden_size, config.num_labels))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor first = rows_at(inputs.at(0), micro.targets.at(1));  // (B, C)
    const at::Tensor pooled = dropout(at::tanh(linear(first, pooler_->weight, pooler_->bias)),
                                      module_->is_training() ? dropout_ : 0.0);
    return classifier_results(linear(pooled, classifier_->weight, classifier_->bias), micro,
                              module_->is_training());
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  double dropout_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights pooler_, classifier_;
};

ConfigSetters setters_of(BertConfig& config) {
  ConfigSetters setters = encoder_setters(config);
  setters.insert({{"max_position_embeddings", set_size(config.max_position_embeddings)},
                  {"vocab_size", set_size(config.vocab_size)},
                  {"type_vocab_size", set_size(config.type_vocab_size)},
                  {"length", set_size(config.length)},
                  {"mlm_probability", set_probability(config.mlm_probability)},
                  {"mask_token", set_size(config.mask_token)},
                  {"num_labels", set_size(config.num_labels)}});
  return setters;
}

ZooModel bert_with_input(const BertConfig& config) {
  ModelInput input;
  input.length = config.length;
  input.vocabulary = config.vocab_size;
  input.sees_all_tokens = true;
  if (config.num_labels > 0) {
    input.kind = ModelInput::Kind::kTexts;
    input.num_classes = config.num_labels;
  } else {
    input.kind = ModelInput::Kind::kTokens;
    input.num_masked = num_masked(config);
    input.mask_token = config.mask_token;
  }
  return {make_bert(config), input};
}

ZooModel make_zoo_bert(const std::string& name, const std::string& text) {
  return bert_with_input(bert_config(name, text));
}

ZooModel read_zoo_bert(ConfigFile& file) { return read_published(file, bert_with_input); }

}  // namespace

ModelFamily bert_family() {
  BertConfig config;
  return {"masked tokens, or classes of texts, as BERT",
          bert_names(),
          keys_of(setters_of(config)),
          make_zoo_bert,
          {"bert"},
          read_zoo_bert};
}

std::vector<std::string> bert_names() { return names_of(bert_presets()); }

BertConfig bert_config(const std::string& name, const std::string& text) {
  BertConfig config = find_preset(bert_presets(), name);
  read_config("a BERT", text, setters_of(config));
  if (config.length == 0) config.length = config.max_position_embeddings;
  if (config.mask_token < 0) config.mask_token = config.vocab_size - 1;
  config.classifier_dropout = config.hidden_dropout_prob;
  num_parameters(config);  // checks the sizes
  return config;
}

std::int64_t num_parameters(const BertConfig& config) {
  const std::int64_t blocks = num_block_parameters(config), width = config.hidden_size,
                     vocabulary = config.vocab_size;
  if (config.max_position_embeddings < 1 || vocabulary < 1 || config.type_vocab_size < 1) {
    throw ConfigError("every size of a BERT must be at least 1");
  }
  if (config.length < 0 || config.length > config.max_position_embeddings) {
    throw ConfigError(fmt::format(
        "length {} is more than the {} positions of the model: raise max_position_embeddings",
        config.length, config.max_position_embeddings));
  }
  if (config.mask_token >= vocabulary) {
    throw ConfigError(
        fmt::format("mask_token {} is not below vocab_size {}", config.mask_token, vocabulary));
  }
  const std::int64_t embedding =
      (vocabulary + config.max_position_embeddings + config.type_vocab_size + 2) * width;
  const std::int64_t dense = (width + 1) * width;  // of either head
  if (config.num_labels > 0) return embedding + blocks + dense + (width + 1) * config.num_labels;
  return embedding + blocks + dense + 2 * width + vocabulary;
}

std::int64_t num_masked(const BertConfig& config) {
  const std::int64_t length = config.length > 0 ? config.length : config.max_position_embeddings;
  return std::max<std::int64_t>(1,
                                std::llround(config.mlm_probability * static_cast<double>(length)));
}

Chain make_bert(const BertConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  const auto embedding = std::make_shared<BertEmbedding>(config);
  chain.add(embedding);
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    chain.add(
        make_encoder_block(config, layer, "bert_block", {NormPlace::kAfter, kNormEps, false, ""}));
  }
  if (config.num_labels > 0) {
    chain.add(std::make_shared<BertClassifier>(config));
  } else {
    chain.add(std::make_shared<BertHead>(config, embedding->words()));
  }
  set_published_form(chain, make_form(config));
  return chain;
}

}  // namespace headroom
