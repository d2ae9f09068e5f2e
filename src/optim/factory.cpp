#include <headroom/optim/factory.h>

#include <fmt/format.h>

#include <limits>
#include <unordered_set>

#include <headroom/core/error.h>
#include "optim/adafactor.h"
#include "optim/adam.h"
#include "optim/adamw_8bit.h"
#include "optim/sgd.h"

namespace headroom {
namespace {

using torch::optim::OptimizerParamGroup;

/// The parameters by what they have in common: weight decay or not, and the precision of their
/// state.
struct Split {
  std::vector<at::Tensor> parameters[2][2];  // [without decay][fp32 state]
};

Split split_parameters(const OptimizerConfig& config, const NamedParameters& named,
                       const KeepFp32State& keep_fp32_state) {
  Split split;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : named) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second)
      continue;
    const bool without_decay = parameter.dim() < 2 && !config.decay_biases_and_norms;
    const bool fp32_state = keep_fp32_state != nullptr && keep_fp32_state(name, parameter);
    split.parameters[without_decay ? 1 : 0][fp32_state ? 1 : 0].push_back(parameter);
  }
  return split;
}

template <typename Optimizer, typename Options, typename KeepFp32>
std::unique_ptr<LeanOptimizer> make(Split split, const OptimizerConfig& config,
                                    const Options& options, const KeepFp32& set_fp32) {
  std::vector<OptimizerParamGroup> groups;
  for (const bool without_decay : {false, true}) {
    for (const bool fp32_state : {false, true}) {
      auto& parameters = split.parameters[without_decay ? 1 : 0][fp32_state ? 1 : 0];
      if (parameters.empty()) continue;
      auto group_options = std::make_unique<Options>(options);
      group_options->weight_decay(without_decay ? 0.0 : config.weight_decay);
      if (fp32_state) set_fp32(*group_options);
      groups.emplace_back(std::move(parameters), std::move(group_options));
    }
  }
  if (groups.empty())
    throw ConfigError(
        "the model has no parameter that requires a gradient: there is nothing to train");
  return std::make_unique<Optimizer>(std::move(groups), options);
}

template <typename Options>
Options adam_options(const OptimizerConfig& config) {
  return Options(config.learning_rate)
      .betas({config.beta1, config.beta2})
      .eps(config.eps)
      .weight_decay(config.weight_decay);
}

}  // namespace

std::unique_ptr<LeanOptimizer> make_optimizer(const OptimizerConfig& config,
                                              const NamedParameters& named,
                                              const KeepFp32State& keep_fp32_state) {
  if (config.name == "adamw_8bit") {
    const auto set_fp32 = [](AdamW8bitOptions& options) {
      options.min_8bit_size(std::numeric_limits<std::int64_t>::max());
    };
    return make<AdamW8bit>(split_parameters(config, named, keep_fp32_state), config,
                           adam_options<AdamW8bitOptions>(config), set_fp32);
  }
  Split split = split_parameters(config, named, nullptr);
  const auto nothing = [](auto& /*options*/) {};
  if (config.name == "sgd") {
    const auto options = SGDOptions(config.learning_rate)
                             .momentum(config.momentum)
                             .weight_decay(config.weight_decay);
    return make<SGD>(std::move(split), config, options, nothing);
  }
  if (config.name == "adam")
    return make<Adam>(std::move(split), config, adam_options<AdamOptions>(config), nothing);
  if (config.name == "adamw")
    return make<AdamW>(std::move(split), config, adam_options<AdamWOptions>(config), nothing);
  if (config.name == "adafactor") {
    const auto options = AdafactorOptions(config.learning_rate)
                             .scale_parameter(false)
                             .weight_decay(config.weight_decay);
    return make<Adafactor>(std::move(split), config, options, nothing);
  }
  throw ConfigError(fmt::format("unknown optimizer \"{}\": choose one of {}", config.name,
                                fmt::join(optimizer_names(), ", ")));
}

}  // namespace headroom
