#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// `x` as `type`, by value as Tensor::to would give it: round to nearest even, NaN stays NaN. Between float and bf16 or fp16 on the CPU it
/// runs vectorised at memory speed. Keeps the strides of a dense x. Not differentiable; always a new tensor.
at::Tensor convert(const at::Tensor& x, at::ScalarType type);

/// The same into `out`, which has the size of x; both contiguous.
void convert_out(const at::Tensor& x, at::Tensor& out);

}  // namespace headroom
