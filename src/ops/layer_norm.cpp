#include "ops/layer_norm.h"

#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A layer norm, or an RMS norm, which has neither mean nor bias.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps, NormKind kind) {
    const std::int64_t num_rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
    at::Tensor y = at::empty_like(x), mean, rstd = ops::make_floats({num_rows}, x);
    if (kind == NormKind::kLayer) mean = ops::make_floats({num_rows}, x);
    ops::layer_norm_forward(x, weight, bias, eps, y, mean, rstd);
    ctx->save_for_backward({x, weight, bias});
    ops::keep_exact(ctx->saved_data, "mean", mean);
    ops::keep_exact(ctx->saved_data, "rstd", rstd);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("a norm");
    const variable_list saved = ctx->get_saved_variables();
    at::Tensor dx = at::empty_like(saved[0]);
    const ops::ParameterGrad dweight(saved[1], ctx->needs_input_grad(1)),
        dbias(saved[2], ctx->needs_input_grad(2));
    ops::layer_norm_backward(
        grads[0].contiguous(), saved[0], ops::take_exact(ctx->saved_data, "mean"),
        ops::take_exact(ctx->saved_data, "rstd"), saved[1], {}, dx, dweight, dbias);
    return {dx, dweight.returned, dbias.returned, {}, {}};
  }
};

}  // namespace

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps) {
  if (weight.defined()) ops::check_sizes(weight, {x.size(-1)}, "the weight of layer_norm");
  if (bias.defined()) ops::check_sizes(bias, {x.size(-1)}, "the bias of layer_norm");
  if (!ops::has_kernels(x)) return ops::plain_layer_norm(x, weight, bias, eps);
  return NormFunction::apply(x.contiguous(), ops::or_empty(weight, x), ops::or_empty(bias, x), eps,
                             NormKind::kLayer);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (weight.defined()) ops::check_sizes(weight, {x.size(-1)}, "the weight of rms_norm");
  if (!ops::has_kernels(x)) return ops::plain_rms_norm(x, weight, eps);
  return NormFunction::apply(x.contiguous(), ops::or_empty(weight, x), ops::or_empty({}, x), eps,
                             NormKind::kRms);
}

at::Tensor norm(NormKind kind, const at::Tensor& x, const at::Tensor& weight,
                const at::Tensor& bias, double eps) {
  return kind == NormKind::kRms ? rms_norm(x, weight, eps) : layer_norm(x, weight, bias, eps);
}

}  // namespace headroom
