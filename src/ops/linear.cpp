#include "ops/linear.h"

#include "ops/direct_gradient.h"
#include "ops/few_rows.h"
#include "ops/passes.h"
#include "ops/plain.h"

#include <torch/csrc/autograd/custom_function.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x (rows, in) times weight (out, in) transposed, plus bias (out) or nothing. `relu` takes the
// positive part, of few rows.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                   bool relu) {
  if (ops::has_few_rows(x, weight)) {
    at::Tensor y = ops::make_values({x.size(0), weight.size(0)}, x);
    ops::few_rows_forward(x.contiguous(), weight, bias, relu, y);
    return y;
  }
  return ops::present(bias) ? at::addmm(bias, x, weight.t()) : x.mm(weight.t());
}

// What one backward computes from the gradient (rows, out) of the product, or of its positive part
// `relu`.
class Gradients {
 public:
  Gradients(const at::Tensor& weight, const at::Tensor& gradient, const at::Tensor& relu)
      : weight_(weight),
        has_few_rows_(ops::has_few_rows(gradient, weight)),
        gradient_(has_few_rows_ ? gradient.contiguous() : gradient),
        relu_(relu) {}

  at::Tensor of_input() const {
    if (!has_few_rows_) return gradient_.mm(weight_);
    at::Tensor dx = ops::make_values({gradient_.size(0), weight_.size(1)}, gradient_);
    ops::few_rows_grad_input(gradient_, relu_, weight_, dx);
    return dx;
  }

  // These two are undefined where they were added to .grad.
  at::Tensor of_weight(const at::Tensor& x) const {
    if (has_few_rows_) {
      const ops::ParameterGrad grad(weight_, true);
      ops::few_rows_grad_weight(gradient_, relu_, x.contiguous(), grad.gradient, grad.accumulate);
      return grad.returned;
    }
    const auto direct = direct_gradient(weight_);
    if (!direct) return gradient_.t().mm(x);
    at::Tensor into = direct->gradient;
    if (direct->is_new) {
      at::mm_out(into, gradient_.t(), x);
    } else {
      into.addmm_(gradient_.t(), x);
    }
    return {};
  }

  at::Tensor of_bias(const at::Tensor& bias) const {
    if (has_few_rows_) {
      const ops::ParameterGrad grad(bias, true);
      ops::few_rows_grad_bias(gradient_, relu_, grad.gradient, grad.accumulate);
      return grad.returned;
    }
    const auto direct = direct_gradient(bias);
    if (!direct) return gradient_.sum(0);
    at::Tensor into = direct->gradient;
    if (direct->is_new) {
      at::sum_out(into, gradient_, {0});
    } else {
      into.add_(gradient_.sum(0));
    }
    return {};
  }

 private:
  const at::Tensor& weight_;
  bool has_few_rows_;
  at::Tensor gradient_;
  at::Tensor relu_;  // undefined: none
};

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, bool relu) {
    at::Tensor y = product(x, weight, bias, relu);
    // Of frozen weights no gradient needs x.
    context->save_for_backward(
        {weight.requires_grad() ? x : at::Tensor(), weight, bias, relu ? y : at::Tensor()});
    context->saved_data["x_needs_grad"] = x.requires_grad();
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &relu = saved[3];
    variable_list result(4);
    if (!gradients[0].defined()) return result;
    const Gradients compute(weight, gradients[0], relu);
    if (weight.requires_grad()) result[1] = compute.of_weight(x);
    if (ops::present(bias) && bias.requires_grad()) result[2] = compute.of_bias(bias);
    if (context->saved_data["x_needs_grad"].toBool()) result[0] = compute.of_input();
    return result;
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (ops::is_autocast(x)) return ops::plain_linear(x, weight, bias);
  return LinearFunction::apply(x, weight, ops::or_empty(bias, x), false);
}

at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  // A node of its own lets go of the gradient that comes in, once it is masked.
  if (ops::is_autocast(x) || !ops::has_few_rows(x, weight)) return linear(x, weight, bias).relu_();
  return LinearFunction::apply(x, weight, ops::or_empty(bias, x), true);
}

}  // namespace headroom
