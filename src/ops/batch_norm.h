#pragma once

// Batch norm in training with the bits of LibTorch's, in less time: LibTorch 1.13 reads the input
// four times and adds one channel's elements after the other's. With the positive part of its
// result (a ReLU) behind it, backward asks for no result: which elements were positive is seen from
// x. Both are also operators, for graphs:
//
//   headroom::batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean,
//                        Tensor? running_var, float momentum, float eps, bool relu) ->
//                        (Tensor, Tensor, Tensor)
//   headroom::batch_norm_again(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean,
//                              Tensor? running_var, Tensor mean, Tensor rstd, float eps, bool relu)
//                              -> Tensor

#include <ATen/core/Tensor.h>

namespace headroom {

struct BatchNormOutputs {
  at::Tensor y;
  at::Tensor mean, rstd;  ///< (C), of this batch; without gradient
};

/// Batch norm of x (N, C, ...) by the statistics of the batch, which it adds to running_mean and
/// running_var; weight, bias and these may be undefined. With `relu` y is the positive part. Every
/// output, gradient and running statistic has the bits of at::batch_norm and at::relu: float
/// tensors on the CPU whose layout is that of their sizes go to kernels of ours, where
/// reproduces_batch_norm(); all others to LibTorch, and under autocast mean and rstd are undefined.
/// Keeps x, and not y but where LibTorch made it.
BatchNormOutputs batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            double momentum, double eps, bool relu = false);

/// y of batch_norm() again, bit for bit, from the same arguments and what it gave beside y; the
/// running statistics are left alone. Not differentiable.
at::Tensor batch_norm_again(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            const at::Tensor& mean, const at::Tensor& rstd, double eps,
                            bool relu = false);

/// Whether our kernels give the bits of this LibTorch on this CPU. Tried once, on a few small
/// tensors.
bool reproduces_batch_norm();

}  // namespace headroom
