#pragma once

#include <headroom/ops/transformer.h>

#include <ATen/core/Tensor.h>

namespace headroom {

/// Layer norm over the last dimension. weight and bias (C) may be undefined. On the CPU in float,
/// keeps x and two floats per row. Values and gradients do not depend on the number of threads.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps = 1e-5);

/// RMS norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight. weight (C) may be
/// undefined. On the CPU in float, keeps x and one float per row. Values and gradients do not
/// depend on the number of threads.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-5);

/// One of the two; `bias` is not used by an RMS norm.
at::Tensor norm(NormKind kind, const at::Tensor& x, const at::Tensor& weight,
                const at::Tensor& bias, double eps);

}  // namespace headroom
