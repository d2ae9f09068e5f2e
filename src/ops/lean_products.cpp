#include "ops/lean_products.h"

#include "ops/once.h"
#include "ops/passes.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = c10::optional<at::Tensor>;

bool is_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided &&
         (tensor.is_cpu() || tensor.is_meta());
}

// The rows that LibTorch multiplies: a view, or else a copy.
at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// at::linear as it is where x requires a gradient. Without one, later versions multiply a batch
// that is not contiguous in another way.
at::Tensor run_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.is_contiguous() || x.dim() == 2)
    return at::linear(x, weight, ops::present(bias) ? MaybeTensor(bias) : MaybeTensor());
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor y = at::mm(rows_of(x), weight.t()).view(sizes);
  return ops::present(bias) ? y.add_(bias) : y;
}

struct LeanLinear : torch::autograd::Function<LeanLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias_sizes"] = bias.sizes();
    return run_linear(x, weight, bias);
  }

  // Each product has the operands, in the order and layout, of what autograd makes of
  // at::linear: their bits depend on these.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("a linear layer");
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return {{}, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor dy_rows = rows_of(dy);
    variable_list gradients(3);
    if (ctx->needs_input_grad(2)) {
      // One addition of rows for matrices and whatever is laid out like one, else after the
      // product.
      const bool adds_bias_in_product = x.dim() == 2 || (x.dim() == 3 && x.is_contiguous());
      gradients[2] = at::sum_to(adds_bias_in_product ? dy_rows : dy,
                                ctx->saved_data["bias_sizes"].toIntVector());
    }
    if (ctx->needs_input_grad(1)) gradients[1] = at::mm(dy_rows.t(), rows_of(x));
    if (ctx->needs_input_grad(0)) gradients[0] = at::mm(dy_rows, weight).view(x.sizes());
    return gradients;
  }
};

struct LeanMatmul : torch::autograd::Function<LeanMatmul> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b) {
    ctx->save_for_backward({a, b});
    return at::matmul(a, b);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("a product of matrices");
    if (!grads[0].defined()) return {{}, {}};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &a = saved[0], &b = saved[1];
    const auto matrices_of = [](const at::Tensor& tensor) {
      return tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
    };
    const at::Tensor dy = matrices_of(grads[0]);
    variable_list gradients(2);
    if (ctx->needs_input_grad(0))
      gradients[0] = at::bmm(dy, matrices_of(b).transpose(1, 2)).view(a.sizes());
    if (ctx->needs_input_grad(1))
      gradients[1] = at::bmm(matrices_of(a).transpose(1, 2), dy).view(b.sizes());
    return gradients;
  }
};

// Batches that LibTorch multiplies one by one, without making any of them larger.
bool are_equal_batches(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() >= 3 && a.dim() == b.dim() && a.numel() > 0 && b.numel() > 0 &&
         a.sizes().slice(0, static_cast<std::size_t>(a.dim() - 2)) ==
             b.sizes().slice(0, static_cast<std::size_t>(b.dim() - 2));
}

at::Tensor linear_operator(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias) {
  const at::Tensor given = bias.value_or(at::Tensor());
  const bool is_ours = x.dim() >= 2 && x.numel() > 0 && is_float(x) && is_float(weight) &&
                       weight.dim() == 2 && weight.is_contiguous() &&
                       (!given.defined() || is_float(given));
  if (!is_ours || ops::is_autocast(x)) return at::linear(x, weight, bias);
  return LeanLinear::apply(x, weight, ops::or_empty(given, x));
}

at::Tensor matmul_operator(const at::Tensor& a, const at::Tensor& b) {
  const bool is_ours = is_float(a) && is_float(b) && are_equal_batches(a, b);
  if (!is_ours || ops::is_autocast(a)) return at::matmul(a, b);
  return LeanMatmul::apply(a, b);
}

TORCH_LIBRARY_FRAGMENT(headroom, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear_operator);
  library.def("matmul(Tensor a, Tensor b) -> Tensor", matmul_operator);
}

}  // namespace

at::Tensor lean_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linear_operator(x, weight, bias.defined() ? MaybeTensor(bias) : MaybeTensor());
}

at::Tensor lean_matmul(const at::Tensor& a, const at::Tensor& b) { return matmul_operator(a, b); }

}  // namespace headroom
