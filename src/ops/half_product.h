#pragma once

#include <ATen/core/Tensor.h>

namespace headroom::ops {

/// Whether products of bf16 matrices use the CPU's instructions for them. Elsewhere they are
/// computed in fp32 from copies: the same function, and slower than fp32 by the copies.
bool has_fast_half_products();

/// c = beta * c + a b, summed in fp32 and rounded once where c is bf16. a (m, k) and b (k, n) are
/// bf16, and each is row-major or the transpose of such, with any distance between rows; c (m, n)
/// is bf16 or float, row-major. On the meta device only the scratch memory is allocated.
void half_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double beta);

}  // namespace headroom::ops
