#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// Drops each element with probability p and scales the others by 1 / (1 - p). On the CPU in float
/// autograd keeps 8 bytes: the decisions come from one number drawn from LibTorch's default CPU
/// generator, and are made again in backward. Throws ConfigError unless 0 <= p <= 1.
at::Tensor dropout(const at::Tensor& x, double p);

}  // namespace headroom
