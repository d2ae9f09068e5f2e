#include "ops/half_product_in_float.h"

#include "ops/convert.h"
#include "ops/passes.h"

#include <ATen/ATen.h>

namespace headroom::ops {
namespace {

// A float copy with the strides of a dense matrix, or of its transpose.
at::Tensor as_floats(const at::Tensor& matrix) {
  const bool is_transposed = matrix.stride(1) != 1;
  const at::Tensor rows = (is_transposed ? matrix.t() : matrix).contiguous();
  at::Tensor floats = make_floats(rows.sizes(), rows);
  if (!rows.is_meta()) convert_out(rows, floats);
  return is_transposed ? floats.t() : floats;
}

}  // namespace

void half_product_in_float(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                           double beta) {
  const at::NoGradGuard no_grad;
  const at::Tensor left = as_floats(a), right = as_floats(b);
  const bool rounds = c.scalar_type() != at::kFloat;
  at::Tensor sums = rounds ? as_floats(c) : c;
  if (c.is_meta()) return;
  sums.addmm_(left, right, beta, 1.0);
  if (rounds) at::Tensor(c).copy_(sums);
}

}  // namespace headroom::ops
