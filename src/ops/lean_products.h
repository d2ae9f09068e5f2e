#pragma once

// Products with the bits of LibTorch's that keep for backward what they are given. LibTorch keeps
// what it multiplies: where an argument is a view of another layout that is a copy, which nobody
// could make again. For graphs they are operators:
//
//   headroom::linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor
//   headroom::matmul(Tensor a, Tensor b) -> Tensor

#include <ATen/core/Tensor.h>

namespace headroom {

/// at::linear: x (..., K), weight (N, K), bias (N) or undefined. Keeps x and weight.
at::Tensor lean_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// at::matmul. Keeps a and b where both are batches of matrices of the same number; others go to
/// LibTorch.
at::Tensor lean_matmul(const at::Tensor& a, const at::Tensor& b);

}  // namespace headroom
