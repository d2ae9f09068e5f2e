#pragma once

// Operators with the bits of LibTorch's that hold less for backward and in it. Products keep what
// they are given; LibTorch keeps what it multiplies, and where an argument is a view of another
// layout that is a copy, which nobody could make again. They let go of x before they make its
// gradient, which is as large. A mean keeps nothing, where LibTorch 1.13 keeps x. For graphs they
// are operators:
//
//   headroom::linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor
//   headroom::matmul(Tensor a, Tensor b) -> Tensor
//   headroom::convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding,
//                         int[] dilation, int groups) -> Tensor
//   headroom::mean(Tensor x, int[] dims, bool keepdim) -> Tensor

#include <ATen/core/Tensor.h>

namespace headroom {

/// at::linear: x (..., K), weight (N, K), bias (N) or undefined. Keeps x and weight.
at::Tensor lean_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// at::convolution, not transposed: x (N, C, ...), weight (O, C / groups, ...), bias (O) or
/// undefined. Keeps x and weight.
at::Tensor lean_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, std::int64_t groups);

/// at::mean over some dimensions. Keeps nothing.
at::Tensor lean_mean(const at::Tensor& x, at::IntArrayRef dims, bool keepdim);

/// at::matmul. Keeps a and b where both are batches of matrices of the same number; others go to
/// LibTorch.
at::Tensor lean_matmul(const at::Tensor& a, const at::Tensor& b);

}  // namespace headroom
