#include "model/llama.h"

#include <headroom/core/error.h>
#include <headroom/model/gpt.h>
#include <headroom/ops/transformer.h>
#include "ops/embedding.h"
#include "ops/layer_norm.h"

#include "model/classifier.h"
#include "model/decoder.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>

namespace headroom {
namespace {

class LlamaEmbedding final : public Stage, public DecoderEmbedding {
 public:
  explicit LlamaEmbedding(const LlamaConfig& config)
      : Stage("embedding"),
        num_positions_(config.max_position_embeddings),
        tokens_(module_->add("embed_tokens",
                             Weights(normal({config.vocab_size, config.hidden_size}), 0))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    return {embed(inputs.at(0), 0)};
  }
  at::Tensor embed(const at::Tensor& tokens, std::int64_t first) const override {
    if (first + tokens.size(1) > num_positions_) {
      throw ConfigError(
          fmt::format("{} tokens in a row, but the model has {} positions: cut the text or raise "
                      "max_position_embeddings",
                      first + tokens.size(1), num_positions_));
    }
    return token_position_embedding(tokens.to(tokens_->weight.device()), tokens_->weight,
                                    {});  // (B, T, C)
  }
  std::int64_t num_positions() const override { return num_positions_; }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }
  const Weights& tokens() const { return tokens_; }

 private:
  std::int64_t num_positions_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights tokens_;
};

std::shared_ptr<Stage> make_block(const LlamaConfig& config, std::int64_t index) {
  const std::int64_t width = config.hidden_size, size = head_size(config),
                     heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  const auto module = std::make_shared<GroupModule>();
  const Weights input_norm = module->add("input_layernorm", make_norm(width, false));
  const auto attention = module->add("self_attn", std::make_shared<GroupModule>());
  const Weights qkv = attention->add(
      "qkv_proj",
      make_linear(width, (heads + 2 * kv_heads) * size, kInitialDeviation, config.attention_bias));
  const Weights output = attention->add(
      "o_proj", make_linear(heads * size, width, kInitialDeviation, config.attention_output_bias));
  const Weights mlp_norm = module->add("post_attention_layernorm", make_norm(width, false));
  const auto mlp = module->add("mlp", std::make_shared<GroupModule>());
  const Weights gate_up = mlp->add(
      "gate_up_proj", make_linear(width, 2 * config.intermediate_size, kInitialDeviation, false));
  const Weights down =
      mlp->add("down_proj", make_linear(config.intermediate_size, width, kInitialDeviation, false));
  BlockOptions options;
  options.num_heads = heads;
  options.attention.causal = true;
  options.attention.num_kv_heads = kv_heads;
  options.attention.rotary = RotaryOptions{config.rope_theta, config.rope_scaling};
  options.norm = NormKind::kRms;
  options.norm_eps = config.rms_norm_eps;
  options.gated = true;
  return std::make_shared<BlockStage>(
      fmt::format("block{}", index), "llama_block", module,
      AttentionWeights{
          input_norm->weight, {}, qkv->weight, qkv->bias, output->weight, output->bias},
      MlpWeights{mlp_norm->weight, {}, gate_up->weight, {}, down->weight, {}}, options);
}

class LlamaHead final : public Stage, public DecoderHead {
 public:
  LlamaHead(const LlamaConfig& config, const Weights& tokens)
      : Stage("head"),
        norm_eps_(config.rms_norm_eps),
        norm_(module_->add("norm", make_norm(config.hidden_size, false))),
        lm_head_(module_->add("lm_head",
                              config.tie_word_embeddings
                                  ? tokens
                                  : Weights(normal({config.vocab_size, config.hidden_size}), 0))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    CrossEntropyOptions options;
    options.reduction = CrossEntropyOptions::Reduction::kSum;
    options.ignore_index = kGptIgnoreIndex;
    return {linear_cross_entropy(rms_norm(inputs.at(0), norm_->weight, norm_eps_), lm_head_->weight,
                                 micro.targets.at(0), options)};
  }
  at::Tensor next_scores(const at::Tensor& x) const override {
    const at::Tensor last = x.select(1, x.size(1) - 1).select(0, 0);  // (C)
    return at::mv(lm_head_->weight, rms_norm(last, norm_->weight, norm_eps_));
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  double norm_eps_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights norm_, lm_head_;
};

}  // namespace

Chain make_llama(const LlamaConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  const auto embedding = std::make_shared<LlamaEmbedding>(config);
  chain.add(embedding);
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    chain.add(make_block(config, layer));
  if (config.num_labels > 0) {
    ScoreHeadOptions options{config.hidden_size, config.num_labels, "norm"};
    options.has_rms_norm = true;
    options.has_norm_bias = false;
    options.norm_eps = config.rms_norm_eps;
    chain.add(make_score_head(options));
  } else {
    chain.add(std::make_shared<LlamaHead>(config, embedding->tokens()));
  }
  set_published_form(chain, make_form(config));
  return chain;
}

}  // namespace headroom
