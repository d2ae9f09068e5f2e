#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Which optimizer, with which numbers, in the words of the command line.
struct OptimizerConfig {
  std::string name = "adamw";  ///< sgd, adam, adamw, adafactor or adamw_8bit
  double learning_rate = 5e-5;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0;  ///< sgd only
  bool decay_biases_and_norms =
      false;  ///< whether weight decay also applies to parameters of fewer than two dimensions
};

/// Parameters with fewer elements keep fp32 moments under adamw_8bit, unless told otherwise.
inline constexpr std::int64_t kMin8bitSize = 4096;

/// The five names, in the order of the documentation.
const std::vector<std::string>& optimizer_names();

/// Bytes of state that make_optimizer's choice keeps for float parameters of these sizes, exactly
/// as the meter counts them. Throws ConfigError on an unknown name, with the names that there are.
std::int64_t optimizer_state_bytes(const OptimizerConfig& config,
                                   const std::vector<std::vector<std::int64_t>>& shapes);

}  // namespace headroom
