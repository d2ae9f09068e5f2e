#pragma once

// What the makers of optimizers share: parameters in groups of equal options, and sizes of state.

#include <headroom/core/error.h>
#include <headroom/optim/optimizer.h>

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

namespace headroom {

/// Bytes of one float of state for each element of a parameter of this shape.
inline std::int64_t float_bytes(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{sizeof(float)},
                         std::multiplies<>());
}

/// Parameters by what they have in common.
struct ParameterSplit {
  std::vector<at::Tensor> parameters[2][2];  ///< [without decay][fp32 state]
};

/// Those that require a gradient, each once.
ParameterSplit split_parameters(const OptimizerConfig& config, const NamedParameters& named,
                                const KeepFp32State& keep_fp32_state);

/// An optimizer with a group for each non-empty part of the split: `options`, without weight decay
/// where the split says so, and changed by `set_fp32(options)` for parameters with fp32 state.
/// Throws ConfigError when there is no parameter to train.
template <typename Optimizer, typename Options, typename SetFp32>
std::unique_ptr<LeanOptimizer> make_grouped(ParameterSplit split, const OptimizerConfig& config,
                                            const Options& options, const SetFp32& set_fp32) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
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

/// The same for an optimizer whose state is alike for all parameters.
template <typename Optimizer, typename Options>
std::unique_ptr<LeanOptimizer> make_grouped(const OptimizerConfig& config,
                                            const NamedParameters& named, const Options& options) {
  return make_grouped<Optimizer>(split_parameters(config, named, nullptr), config, options,
                                 [](Options& /*options*/) {});
}

}  // namespace headroom
