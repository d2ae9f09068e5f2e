#include "ops/linear.h"

#include "ops/passes.h"
#include "ops/plain.h"

#include "ops/direct_gradient.h"

#include <torch/csrc/autograd/custom_function.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& gradient,
                           const at::Tensor& x) {
  auto direct = direct_gradient(weight);
  if (!direct) return gradient.t().mm(x);
  if (direct->is_new) {
    at::mm_out(direct->gradient, gradient.t(), x);
  } else {
    direct->gradient.addmm_(gradient.t(), x);
  }
  return {};
}

at::Tensor bias_gradient(const at::Tensor& bias, const at::Tensor& gradient) {
  auto direct = direct_gradient(bias);
  if (!direct) return gradient.sum(0);
  if (direct->is_new) {
    at::sum_out(direct->gradient, gradient, {0});
  } else {
    direct->gradient.add_(gradient.sum(0));
  }
  return {};
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    // Of frozen weights no gradient needs x.
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight, bias});
    context->saved_data["x_needs_grad"] = x.requires_grad();
    return ops::present(bias) ? at::addmm(bias, x, weight.t()) : x.mm(weight.t());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& bias = saved[2];
    const at::Tensor& gradient = gradients[0];  // (rows, out)
    if (!gradient.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    at::Tensor dweight =
        weight.requires_grad() ? weight_gradient(weight, gradient, x) : at::Tensor();
    at::Tensor dbias =
        ops::present(bias) && bias.requires_grad() ? bias_gradient(bias, gradient) : at::Tensor();
    at::Tensor dx =
        context->saved_data["x_needs_grad"].toBool() ? gradient.mm(weight) : at::Tensor();
    return {dx, dweight, dbias};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (ops::is_autocast(x)) return ops::plain_linear(x, weight, bias);
  return LinearFunction::apply(x, weight, ops::or_empty(bias, x));
}

}  // namespace headroom
