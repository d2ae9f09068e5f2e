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
/// dx = dy weight. Here and below, y is what few_rows_forward() gave with `relu`, and dy counts as
/// 0 where it is not positive; undefined without.
void few_rows_grad_input(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& weight,
                         at::Tensor dx);
/// dweight = (accumulate ? dweight : 0) + dy^T x
void few_rows_grad_weight(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& x,
                          at::Tensor dweight, bool accumulate);
/// dbias = (accumulate ? dbias : 0) + the sum of the rows of dy
void few_rows_grad_bias(const at::Tensor& dy, const at::Tensor& y, at::Tensor dbias,
                        bool accumulate);

}  // namespace headroom::ops
