#pragma once

#include <ATen/core/Tensor.h>

namespace headroom::ops {

/// half_product() for a CPU, or a build, without instructions for it.
void half_product_in_float(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                           double beta);

}  // namespace headroom::ops
