#include "ops/dropout.h"

#include "ops/once.h"
#include "ops/passes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, double p,
                            std::int64_t seed) {
    at::Tensor y = at::empty_like(x);
    ops::dropout_add(ops::dropout_from_seed(p, static_cast<std::uint64_t>(seed)), x, {}, {}, y);
    ctx->saved_data["p"] = p;
    ctx->saved_data["seed"] = seed;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("dropout");
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(dy);
    const auto seed = static_cast<std::uint64_t>(ctx->saved_data["seed"].toInt());
    ops::dropout_add(ops::dropout_from_seed(ctx->saved_data["p"].toDouble(), seed), dy, {}, {}, dx);
    return {dx, {}, {}};
  }
};

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p) {
  if (p == 0.0 || x.numel() == 0) return x;
  if (!ops::has_kernels(x)) return at::dropout(x, p, true);
  const kernels::Dropout drawn = ops::draw_dropout(p);
  const at::Tensor rows = x.dim() == 0 ? x.reshape({1}) : x.contiguous();
  return DropoutFunction::apply(rows, p, static_cast<std::int64_t>(drawn.seed)).view(x.sizes());
}

}  // namespace headroom
