#pragma once

// The same functions from LibTorch's own differentiable operations, for types and devices that our
// kernels do not take.

#include <headroom/ops/transformer.h>

namespace headroom::ops {

at::Tensor plain_attention(const at::Tensor& qkv, std::int64_t num_heads,
                           const AttentionOptions& options);
at::Tensor plain_layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            double eps);
at::Tensor plain_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor plain_gelu(const at::Tensor& x, GeluKind kind);
/// silu(gate) * up of x = (gate, up).
at::Tensor plain_swiglu(const at::Tensor& x);
at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
at::Tensor plain_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                      const at::Tensor& targets,
                                      const CrossEntropyOptions& options);

}  // namespace headroom::ops
