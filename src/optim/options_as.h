#pragma once

#include <string>

#include <headroom/core/error.h>
#include <headroom/optim/optimizer.h>

namespace headroom {

/// The options of a parameter group, which must be of the optimizer's own type. Throws ConfigError
/// otherwise.
template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options,
                          const LeanOptimizer& optimizer) {
  const auto* found = dynamic_cast<const Options*>(&options);
  if (found == nullptr) {
    throw ConfigError(std::string("a parameter group of ") + optimizer.name() +
                      " has the options of another optimizer");
  }
  return *found;
}

}  // namespace headroom
