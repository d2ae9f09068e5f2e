#include <headroom/model/gpt.h>

#include <headroom/core/error.h>
#include <headroom/ops/transformer.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"

#include "model/classifier.h"
#include "model/decoder.h"
#include "model/gpt_published.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>

#include <cmath>

namespace headroom {
namespace {

class GptEmbedding final : public Stage, public DecoderEmbedding {
 public:
  explicit GptEmbedding(const GptConfig& config)
      : Stage("embedding"),
        dropout_(config.dropout),
        wte_(module_->add("wte", Weights(normal({config.vocab_size, config.n_embd}), 0))),
        wpe_(module_->add("wpe", Weights(normal({config.block_size, config.n_embd}), 0))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    // Where a row holds several texts, the third input says each token's place in its own.
    const bool is_packed = inputs.size() > 2;
    at::Tensor x = token_position_embedding(inputs.at(0), wte_->weight,
                                            is_packed ? at::Tensor() : wpe_->weight);  // (B, T, C)
    if (is_packed) x = x + token_position_embedding(inputs[2], wpe_->weight, {});
    return {dropout(x, module_->is_training() ? dropout_ : 0.0)};
  }
  at::Tensor embed(const at::Tensor& tokens, std::int64_t first) const override {
    return token_position_embedding(tokens.to(wte_->weight.device()), wte_->weight,
                                    wpe_->weight.slice(0, first));
  }
  std::int64_t num_positions() const override { return wpe_->weight.size(0); }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }
  const Weights& tokens() const { return wte_; }

 private:
  double dropout_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights wte_, wpe_;
};

std::shared_ptr<Stage> make_block(const GptConfig& config, std::int64_t index) {
  const std::int64_t width = config.n_embd;
  const double projection =
      kInitialDeviation / std::sqrt(2.0 * static_cast<double>(config.n_layer));
  const auto module = std::make_shared<GroupModule>();
  const Weights ln_1 = module->add("ln_1", make_norm(width, config.bias));
  const auto attention = module->add("attn", std::make_shared<GroupModule>());
  const Weights c_attn =
      attention->add("c_attn", make_linear(width, 3 * width, kInitialDeviation, config.bias));
  const Weights c_proj =
      attention->add("c_proj", make_linear(width, width, projection, config.bias));
  const Weights ln_2 = module->add("ln_2", make_norm(width, config.bias));
  const auto mlp = module->add("mlp", std::make_shared<GroupModule>());
  const Weights c_fc =
      mlp->add("c_fc", make_linear(width, 4 * width, kInitialDeviation, config.bias));
  const Weights mlp_proj =
      mlp->add("c_proj", make_linear(4 * width, width, projection, config.bias));
  BlockOptions options;
  options.num_heads = config.n_head;
  options.attention.causal = true;
  options.attention.dropout_p = options.residual_dropout_p = config.dropout;
  options.gelu = config.gelu;
  return std::make_shared<BlockStage>(fmt::format("block{}", index), "gpt_block", module,
                                      AttentionWeights{ln_1->weight, ln_1->bias, c_attn->weight,
                                                       c_attn->bias, c_proj->weight, c_proj->bias},
                                      MlpWeights{ln_2->weight, ln_2->bias, c_fc->weight, c_fc->bias,
                                                 mlp_proj->weight, mlp_proj->bias},
                                      options);
}

class GptHead final : public Stage, public DecoderHead {
 public:
  GptHead(const GptConfig& config, const Weights& tokens)
      : Stage("head"),
        ln_f_(module_->add("ln_f", make_norm(config.n_embd, config.bias))),
        tokens_(module_->add("lm_head", tokens)) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    CrossEntropyOptions options;
    options.reduction = CrossEntropyOptions::Reduction::kSum;
    options.ignore_index = kGptIgnoreIndex;
    return {linear_cross_entropy(layer_norm(inputs.at(0), ln_f_->weight, ln_f_->bias),
                                 tokens_->weight, micro.targets.at(0), options)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

  at::Tensor next_scores(const at::Tensor& x) const override {
    const at::Tensor last = x.select(1, x.size(1) - 1).select(0, 0);  // (C)
    return at::mv(tokens_->weight, layer_norm(last, ln_f_->weight, ln_f_->bias));
  }

 private:
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights ln_f_, tokens_;
};

}  // namespace

Chain make_gpt(const GptConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  const auto embedding = std::make_shared<GptEmbedding>(config);
  chain.add(embedding);
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer)
    chain.add(make_block(config, layer));
  if (config.num_labels > 0) {
    ScoreHeadOptions options{config.n_embd, config.num_labels, "ln_f"};
    options.has_norm_bias = config.bias;
    chain.add(make_score_head(options));
  } else {
    chain.add(std::make_shared<GptHead>(config, embedding->tokens()));
  }
  set_published_form(chain, make_form(config));
  return chain;
}

}  // namespace headroom
