#pragma once

#include <headroom/execute/accumulator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// What is said of the update with this number (from 1) when it is skipped because something is not
/// finite: names the first gradient that is not, or `otherwise` where all are. Throws Error with
/// the same words when the policy is kError.
std::string skip_or_throw(NonFinitePolicy policy, std::int64_t update,
                          const std::vector<std::pair<std::string, at::Tensor>>& named_gradients,
                          const std::string& otherwise);

}  // namespace headroom
