#include "model/transformer_parts.h"

#include <headroom/core/error.h>
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/low_rank.h"

#include <fmt/format.h>

namespace headroom {

namespace {

void drop_nothing(BlockOptions& options) {
  options.attention.dropout_p = options.residual_dropout_p = options.adapter_dropout_p = 0.0;
}

}  // namespace

std::vector<BlockStage::Layer> BlockStage::adaptable_layers() {
  return {{attention_.qkv_weight, &attention_.qkv_adapters},
          {attention_.proj_weight, &attention_.proj_adapters},
          {mlp_.hidden_weight, &mlp_.hidden_adapters},
          {mlp_.out_weight, &mlp_.out_adapters}};
}

std::vector<at::Tensor> BlockStage::forward(const std::vector<at::Tensor>& inputs,
                                            const MicroBatch& micro, int option) {
  BlockOptions options = options_;
  options.keep = static_cast<BlockKeep>(option);
  if (!module_->is_training()) drop_nothing(options);
  if (micro.inputs.size() > 1 && micro.inputs[1].scalar_type() == at::kBool)
    options.attention.key_mask = micro.inputs[1];
  if (micro.inputs.size() > 1 && micro.inputs[1].scalar_type() == at::kInt)
    options.attention.first_keys = micro.inputs[1];
  const auto block = norms_ == NormPlace::kBefore ? transformer_block : post_norm_block;
  std::vector<at::Tensor> outputs(inputs.begin(), inputs.end() - 1);
  outputs.push_back(block(inputs.back(), attention_, mlp_, options));
  return outputs;
}

KeyValueCache BlockStage::make_cache(std::int64_t capacity) const {
  const std::int64_t num_kv_heads = options_.attention.num_kv_heads.value_or(options_.num_heads);
  return {num_kv_heads, capacity,
          attention_.qkv_weight.size(0) / (options_.num_heads + 2 * num_kv_heads),
          attention_.qkv_weight};
}

at::Tensor BlockStage::decode(const at::Tensor& x, KeyValueCache& cache) const {
  const torch::NoGradGuard no_grad;
  BlockOptions options = options_;
  drop_nothing(options);
  const auto adapted = [&](const at::Tensor& in, const at::Tensor& weight, const at::Tensor& bias,
                           const std::vector<LowRank>& adapters) {
    const at::Tensor out = linear(in, weight, bias);
    ops::LowRankCall(adapters, options.adapter_scale, 0.0).add(in, out);
    return out;
  };
  const auto rows = [](const at::Tensor& t) { return t.reshape({t.size(1), t.size(2)}); };
  const at::Tensor normed =
      norm(options.norm, x, attention_.norm_weight, attention_.norm_bias, options.norm_eps);
  const at::Tensor qkv =
      adapted(rows(normed), attention_.qkv_weight, attention_.qkv_bias, attention_.qkv_adapters);
  const at::Tensor y =
      cached_attention(qkv.unsqueeze(0), options.num_heads, options.attention, cache);
  const at::Tensor added =
      adapted(rows(y), attention_.proj_weight, attention_.proj_bias, attention_.proj_adapters);
  return mlp_residual(x + added.unsqueeze(0), mlp_, options);
}

ConfigSetters encoder_setters(EncoderConfig& config) {
  return {{"hidden_size", set_size(config.hidden_size)},
          {"num_hidden_layers", set_layers(config.num_hidden_layers)},
          {"num_attention_heads", set_size(config.num_attention_heads)},
          {"intermediate_size", set_size(config.intermediate_size)},
          {"hidden_dropout_prob", set_probability(config.hidden_dropout_prob)},
          {"attention_probs_dropout_prob", set_probability(config.attention_probs_dropout_prob)},
          {"dropout",
           set_probabilities({&config.hidden_dropout_prob, &config.attention_probs_dropout_prob})}};
}

std::int64_t num_block_parameters(const EncoderConfig& config) {
  const std::int64_t width = config.hidden_size, hidden = config.intermediate_size,
                     heads = config.num_attention_heads;
  if (width < 1 || hidden < 1 || heads < 1 || config.num_hidden_layers < 1)
    throw ConfigError("every size of an encoder must be at least 1");
  if (width % heads != 0) {
    throw ConfigError(fmt::format(
        "hidden_size {} is not a multiple of num_attention_heads {}; the nearest that is: {}",
        width, heads, (width / heads + 1) * heads));
  }
  const std::int64_t attention = 4 * (width * width + width),
                     mlp = 2 * width * hidden + hidden + width, norms = 4 * width;
  return config.num_hidden_layers * (attention + mlp + norms);
}

std::shared_ptr<Stage> make_encoder_block(const EncoderConfig& config, std::int64_t index,
                                          const std::string& kind,
                                          const EncoderBlockOptions& encoder_options) {
  const std::int64_t width = config.hidden_size;
  const auto module = std::make_shared<GroupModule>();
  const auto attention = module->add("attention", std::make_shared<GroupModule>()),
             mlp = module->add("mlp", std::make_shared<GroupModule>());
  const Weights norm = attention->add("norm", make_norm(width)),
                qkv = attention->add("qkv", make_linear(width, 3 * width));
  const Weights output = attention->add("output", make_linear(width, width));
  const Weights mlp_norm = mlp->add("norm", make_norm(width)),
                hidden = mlp->add("hidden", make_linear(width, config.intermediate_size));
  const Weights mlp_output = mlp->add("output", make_linear(config.intermediate_size, width));
  BlockOptions options;
  options.num_heads = config.num_attention_heads;
  options.attention.dropout_p = config.attention_probs_dropout_prob;
  options.residual_dropout_p = config.hidden_dropout_prob;
  options.norm_eps = encoder_options.norm_eps;
  options.attention.causal = encoder_options.causal;
  options.gelu = encoder_options.gelu;
  return std::make_shared<BlockStage>(
      fmt::format("{}block{}", encoder_options.name_prefix, index), kind, module,
      AttentionWeights{norm->weight, norm->bias, qkv->weight, qkv->bias, output->weight,
                       output->bias},
      MlpWeights{mlp_norm->weight, mlp_norm->bias, hidden->weight, hidden->bias, mlp_output->weight,
                 mlp_output->bias},
      options, encoder_options.norms);
}

std::vector<PublishedRow> published_block_rows(const std::string& name_prefix,
                                               const PublishedBlockNames& names) {
  const std::string block = name_prefix + "block*.";
  const auto theirs = [&](const std::string& part) { return names.layers + part; };
  return {{block + "attention.norm", {theirs(names.attention_norm)}},
          {block + "attention.qkv", {theirs(names.query), theirs(names.key), theirs(names.value)}},
          {block + "attention.output", {theirs(names.attention_output)}},
          {block + "mlp.norm", {theirs(names.mlp_norm)}},
          {block + "mlp.hidden", {theirs(names.hidden)}},
          {block + "mlp.output", {theirs(names.output)}}};
}

void exchange_encoder(ConfigFile& file, EncoderConfig& config, double dropout_if_absent) {
  file.size("hidden_size", config.hidden_size, 768);
  file.size("num_hidden_layers", config.num_hidden_layers, 12, set_layers);
  file.size("num_attention_heads", config.num_attention_heads, 12);
  file.size("intermediate_size", config.intermediate_size, 3072);
  file.probability("hidden_dropout_prob", config.hidden_dropout_prob, dropout_if_absent);
  file.probability("attention_probs_dropout_prob", config.attention_probs_dropout_prob,
                   dropout_if_absent);
}

void check_patches(std::int64_t rows, std::int64_t columns, std::int64_t patch_size) {
  if (patch_size >= 1 && rows >= 1 && columns >= 1 && rows % patch_size == 0 &&
      columns % patch_size == 0)
    return;
  throw ConfigError(
      fmt::format("images of {} x {} are not whole patches of {} x {}: set image_size or "
                  "patch_size in --model_config",
                  rows, columns, patch_size, patch_size));
}

}  // namespace headroom
