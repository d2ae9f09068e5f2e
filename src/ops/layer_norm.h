#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// Layer norm over the last dimension. weight and bias (C) may be undefined. On the CPU in float,
/// keeps x and two floats per row. Values and gradients do not depend on the number of threads.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps = 1e-5);

}  // namespace headroom
