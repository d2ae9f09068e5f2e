#include <headroom/model/gpt.h>

#include <headroom/core/error.h>
#include <headroom/ops/cross_entropy.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"

#include "model/transformer_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace headroom {
namespace {

class GptEmbedding final : public Stage {
 public:
  explicit GptEmbedding(const GptConfig& config)
      : Stage("embedding"),
        dropout_(config.dropout),
        wte_(module_->add("wte", Weights(normal({config.vocab_size, config.n_embd}), 0))),
        wpe_(module_->add("wpe", Weights(normal({config.block_size, config.n_embd}), 0))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    const at::Tensor x =
        token_position_embedding(inputs.at(0), wte_->weight, wpe_->weight);  // (B, T, C)
    return {dropout(x, module_->is_training() ? dropout_ : 0.0)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }
  const Weights& tokens() const { return wte_; }
  std::int64_t block_size() const { return wpe_->weight.size(0); }

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

class GptHead final : public Stage {
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

  /// Scores of the token after the last one, (V).
  at::Tensor next_scores(const at::Tensor& x) const {
    const at::Tensor last = x.select(1, x.size(1) - 1).select(0, 0);  // (C)
    return at::mv(tokens_->weight, layer_norm(last, ln_f_->weight, ln_f_->bias));
  }

 private:
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights ln_f_, tokens_;
};

std::int64_t draw_token(const at::Tensor& scores, const GenerateOptions& options,
                        std::mt19937_64& random) {
  if (options.temperature == 0.0) return scores.argmax().item<std::int64_t>();
  at::Tensor scaled = scores.to(at::kDouble) / options.temperature;
  if (options.top_k > 0 && options.top_k < scaled.numel()) {
    const at::Tensor least = std::get<0>(scaled.topk(options.top_k)).min();
    scaled = scaled.masked_fill(scaled < least, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor cumulative = scaled.softmax(0).cumsum(0).contiguous();
  const double* sums = cumulative.data_ptr<double>();
  const double u = std::uniform_real_distribution<double>()(random) * sums[cumulative.numel() - 1];
  const double* found = std::upper_bound(sums, sums + cumulative.numel(), u);
  return std::min<std::int64_t>(found - sums, cumulative.numel() - 1);
}

}  // namespace

Chain make_gpt(const GptConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  const auto embedding = std::make_shared<GptEmbedding>(config);
  chain.add(embedding);
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer)
    chain.add(make_block(config, layer));
  chain.add(std::make_shared<GptHead>(config, embedding->tokens()));
  return chain;
}

std::string gpt2_parameter_name(const std::string& chain_name) {
  const auto [stage, rest] = split_name(chain_name);
  if (stage.rfind("block", 0) == 0) return "transformer.h." + stage.substr(5) + "." + rest;
  return rest.rfind("lm_head", 0) == 0 ? rest : "transformer." + rest;
}

std::vector<std::int64_t> generate(const Chain& chain, const std::vector<std::int64_t>& prompt,
                                   const GenerateOptions& options) {
  const auto* embedding =
      chain.size() < 2 ? nullptr : dynamic_cast<const GptEmbedding*>(&chain.stage(0));
  const auto* head =
      chain.size() < 2 ? nullptr : dynamic_cast<const GptHead*>(&chain.stage(chain.size() - 1));
  if (embedding == nullptr || head == nullptr)
    throw ConfigError("only a model made by make_gpt can generate text");
  if (prompt.empty()) throw ConfigError("generate needs at least one token to start from");
  const torch::NoGradGuard no_grad;
  const bool was_training = embedding->module()->is_training();
  chain.train(false);
  std::mt19937_64 random(options.seed);
  std::vector<std::int64_t> tokens = prompt;
  for (std::int64_t i = 0; i < options.num_tokens; ++i) {
    const auto count =
        std::min<std::int64_t>(embedding->block_size(), static_cast<std::int64_t>(tokens.size()));
    at::Tensor x =
        torch::tensor(std::vector<std::int64_t>(tokens.end() - count, tokens.end()), torch::kLong)
            .unsqueeze(0);  // (1, T)
    x = x.to(embedding->tokens()->weight.device());
    for (std::size_t stage = 0; stage + 1 < chain.size(); ++stage)
      x = chain.stage(stage).forward({x}, {}, 0).at(0);
    tokens.push_back(draw_token(head->next_scores(x).cpu(), options, random));
  }
  chain.train(was_training);
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace headroom
