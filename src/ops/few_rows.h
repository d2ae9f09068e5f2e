#pragma once

// Products of a batch of few rows with a large weight, by our kernels: on sizes like these a BLAS
// spends more time on packing the weight than on the product. The choice depends on sizes and types
// alone, and results do not depend on the number of threads.

#include <ATen/core/Tensor.h>

namespace headroom::ops {

/// True when the products of x (rows, in) and weight (out, in) are made here: floats on the CPU, or
/// on the meta device, where nothing is computed.
bool has_few_rows(const at::Tensor& x, const at::Tensor& weight);
/// y = x weight^T + bias, its positive part with `relu`; the bias may be empty. All contiguous.
void few_rows_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      bool relu, at::Tensor y);
/// dx = dy weight
void few_rows_grad_input(const at::Tensor& dy, const at::Tensor& weight, at::Tensor dx);
/// dweight = (accumulate ? dweight : 0) + dy^T x
void few_rows_grad_weight(const at::Tensor& dy, const at::Tensor& x, at::Tensor dweight,
                          bool accumulate);
/// dbias = (accumulate ? dbias : 0) + the sum of the rows of dy
void few_rows_grad_bias(const at::Tensor& dy, at::Tensor dbias, bool accumulate);
/// dy where y, the positive part of something, is positive; 0 elsewhere.
at::Tensor few_rows_grad_relu(const at::Tensor& dy, const at::Tensor& y);

}  // namespace headroom::ops
