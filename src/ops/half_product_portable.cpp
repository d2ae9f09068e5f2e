// Without oneDNN's headers.
#include "ops/half_product.h"

#include "ops/half_product_in_float.h"

namespace headroom::ops {

bool has_fast_half_products() { return false; }

void half_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double beta) {
  half_product_in_float(a, b, c, beta);
}

}  // namespace headroom::ops
