#pragma once

#include <headroom/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Which optimizer, with which numbers, in the words of the command line.
struct OptimizerConfig {
  std::string name = "adamw";  ///< one of optimizer_names()
  double learning_rate = 5e-5;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0;  ///< sgd only
  /// Whether weight decay also applies to parameters of fewer than two dimensions.
  bool decay_biases_and_norms = false;
};

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// Sizes of parameters.
using ParameterShapes = std::vector<std::vector<std::int64_t>>;

/// Tells by name and tensor whether adamw_8bit shall keep fp32 moments for a parameter (customary
/// for embeddings, at 8 bytes each).
using KeepFp32State = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

/// The names that OptimizerConfig may have, in the order of the documentation.
const std::vector<std::string>& optimizer_names();

/// Makes the optimizer that `config` names, for those parameters that require a gradient; a
/// parameter that is listed twice (tied weights) counts once. There are at most two kinds of group,
/// in this order: with weight decay, and without it (biases and norms: fewer than two dimensions).
/// adafactor has a fixed rate and no parameter scaling, as in Hugging Face's trainer. State is
/// allocated by prepare_state() or at the first step. Throws ConfigError on an unknown name,
/// naming the nearest, or numbers out of range.
std::unique_ptr<LeanOptimizer> make_optimizer(const OptimizerConfig& config,
                                              const NamedParameters& parameters,
                                              const KeepFp32State& keep_fp32_state = nullptr);

/// Bytes of state that make_optimizer's choice keeps for float parameters of these sizes, exactly
/// as the meter counts them. Throws ConfigError on an unknown name.
std::int64_t optimizer_state_bytes(const OptimizerConfig& config, const ParameterShapes& shapes);

}  // namespace headroom
