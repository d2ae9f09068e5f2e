#include "model/transformer_parts.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

namespace headroom {

std::vector<at::Tensor> BlockStage::forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro, int option) {
  BlockOptions options = options_;
  options.keep = static_cast<BlockKeep>(option);
  if (!module_->is_training()) options.attention.dropout_p = options.residual_dropout_p = 0.0;
  if (micro.inputs.size() > 1) options.attention.key_mask = micro.inputs[1];
  const auto block = norms_ == NormPlace::kBefore ? transformer_block : post_norm_block;
  return {block(inputs.at(0), attention_, mlp_, options)};
}

ConfigSetters encoder_setters(EncoderConfig& config) {
  return {{"hidden_size", set_size(config.hidden_size)},
          {"num_hidden_layers", set_size(config.num_hidden_layers)},
          {"num_attention_heads", set_size(config.num_attention_heads)},
          {"intermediate_size", set_size(config.intermediate_size)},
          {"hidden_dropout_prob", set_probability(config.hidden_dropout_prob)},
          {"attention_probs_dropout_prob", set_probability(config.attention_probs_dropout_prob)},
          {"dropout", set_probabilities({&config.hidden_dropout_prob, &config.attention_probs_dropout_prob})}};
}

std::int64_t num_block_parameters(const EncoderConfig& config) {
  const std::int64_t width = config.hidden_size, hidden = config.intermediate_size, heads = config.num_attention_heads;
  if (width < 1 || hidden < 1 || heads < 1 || config.num_hidden_layers < 1)
    throw ConfigError("every size of an encoder must be at least 1");
  if (width % heads != 0) {
    throw ConfigError(fmt::format("hidden_size {} is not a multiple of num_attention_heads {}; the nearest that is: {}", width, heads,
                                  (width / heads + 1) * heads));
  }
  const std::int64_t attention = 4 * (width * width + width), mlp = 2 * width * hidden + hidden + width, norms = 4 * width;
  return config.num_hidden_layers * (attention + mlp + norms);
}

std::shared_ptr<Stage> make_encoder_block(const EncoderConfig& config, std::int64_t index, const std::string& kind,
                                          const EncoderNorms& norms) {
  const std::int64_t width = config.hidden_size;
  const auto module = std::make_shared<GroupModule>();
  const auto attention = module->add("attention", std::make_shared<GroupModule>()),
             mlp = module->add("mlp", std::make_shared<GroupModule>());
  const Weights norm = attention->add("norm", make_norm(width)), qkv = attention->add("qkv", make_linear(width, 3 * width));
  const Weights output = attention->add("output", make_linear(width, width));
  const Weights mlp_norm = mlp->add("norm", make_norm(width)), hidden = mlp->add("hidden", make_linear(width, config.intermediate_size));
  const Weights mlp_output = mlp->add("output", make_linear(config.intermediate_size, width));
  BlockOptions options;
  options.num_heads = config.num_attention_heads;
  options.attention.dropout_p = config.attention_probs_dropout_prob;
  options.residual_dropout_p = config.hidden_dropout_prob;
  options.norm_eps = norms.eps;
  options.gelu = GeluKind::kExact;
  return std::make_shared<BlockStage>(
      fmt::format("block{}", index), kind, module,
      AttentionWeights{norm->weight, norm->bias, qkv->weight, qkv->bias, output->weight, output->bias},
      MlpWeights{mlp_norm->weight, mlp_norm->bias, hidden->weight, hidden->bias, mlp_output->weight, mlp_output->bias}, options,
      norms.place);
}

std::vector<std::string> published_block_names(const std::string& chain_name, const std::string& layers,
                                               const std::map<std::string, std::string>& parts) {
  const auto [stage, rest] = split_name(chain_name);
  const std::size_t dot = rest.rfind('.');
  const std::string part = rest.substr(0, dot), start = layers + stage.substr(5) + "." + parts.at(part), end = rest.substr(dot);
  if (part != "attention.qkv") return {start + end};
  return {start + ".query" + end, start + ".key" + end, start + ".value" + end};
}

std::pair<std::string, std::string> split_name(const std::string& chain_name) {
  const std::size_t dot = chain_name.find('.');
  return {chain_name.substr(0, dot), chain_name.substr(dot + 1)};
}

}  // namespace headroom
