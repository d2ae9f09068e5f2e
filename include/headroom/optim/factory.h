#pragma once

#include <headroom/optim/optimizer.h>
#include <headroom/optim/optimizer_config.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>
#include "memory"

namespace headroom {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// Tells by name and tensor whether adamw_8bit shall keep fp32 moments for a parameter (customary
/// for embeddings, at 8 bytes each).
using KeepFp32State = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

/// Makes the optimizer that `config` names, for those parameters that require a gradient; a
/// parameter that is listed twice (tied weights) counts once. There are at most two kinds of group,
/// in this order: with weight decay, and without it (biases and norms: fewer than two dimensions).
/// adafactor has a fixed rate and no parameter scaling, as in Hugging Face's trainer. State is
/// allocated by prepare_state() or at the first step. Throws ConfigError on an unknown name or
/// numbers out of range.
std::unique_ptr<LeanOptimizer> make_optimizer(const OptimizerConfig& config,
                                              const NamedParameters& parameters,
                                              const KeepFp32State& keep_fp32_state = nullptr);

}  // namespace headroom
