#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// x (rows, in) times weight (out, in) transposed, plus bias (out): torch::linear, whose backward
/// can write parameter gradients directly (see direct_gradient.h). Keeps x alone. `bias` may be
/// undefined. Under autocast it is torch::linear.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
/// Its positive part. Keeps x and the result.
at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace headroom
