#include "ops/lean_operators.h"

#include "ops/convolution.h"
#include "ops/graph_node.h"
#include "ops/once.h"
#include "ops/passes.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using ops::KeptTensor;
using ops::maybe;
using ops::MaybeTensor;
using ops::Window;
using ops::with_history;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided &&
         (tensor.is_cpu() || tensor.is_meta());
}

// The rows that LibTorch multiplies: a view, or else a copy.
at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// at::linear as it is where x requires a gradient. Without one, later versions multiply a batch
// that is not contiguous in another way.
at::Tensor run_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.is_contiguous() || x.dim() == 2) return at::linear(x, weight, maybe(bias));
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor y = at::mm(rows_of(x), weight.t()).view(sizes);
  return ops::present(bias) ? y.add_(bias) : y;
}

// A tensor of x's layout that takes no memory: zeros that the system has pages for only when they
// are read. x itself where it has none.
at::Tensor without_memory(const at::Tensor& x) {
  if (x.is_meta()) {
    const at::Tensor layout = at::empty({0}, x.options());
    layout.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    return layout;
  }
  std::size_t num_bytes = x.itemsize();
  for (std::int64_t i = 0; i < x.dim(); ++i)
    num_bytes += static_cast<std::size_t>((x.size(i) - 1) * x.stride(i)) * x.itemsize();
  void* pages =
      ::mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return x;
  const auto unmap = [num_bytes](void* mapped) { ::munmap(mapped, num_bytes); };
  return at::from_blob(pages, x.sizes(), x.strides(), unmap, x.options());
}

class LinearNode final : public torch::autograd::Node {
 public:
  // Each product has the operands, in the order and layout, of what autograd makes of
  // at::linear: their bits depend on these.
  variable_list apply(variable_list&& grads) override {
    ops::check_differentiated_once("a linear layer");
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return variable_list(3);
    at::Tensor x = x_.take();
    const std::vector<std::int64_t> sizes = x.sizes().vec();
    const at::Tensor dy_rows = rows_of(dy);
    variable_list gradients(3);
    if (task_should_compute_output(2)) {
      // One addition of rows for matrices and whatever is laid out like one, else after the
      // product.
      const bool adds_bias_in_product = x.dim() == 2 || (x.dim() == 3 && x.is_contiguous());
      gradients[2] = at::sum_to(adds_bias_in_product ? dy_rows : dy, bias_sizes_);
    }
    if (task_should_compute_output(1)) gradients[1] = at::mm(dy_rows.t(), rows_of(x));
    x.reset();
    if (task_should_compute_output(0)) gradients[0] = at::mm(dy_rows, weight_.get()).view(sizes);
    return gradients;
  }

  void release_variables() override {
    x_.release();
    weight_.release();
  }

  std::string name() const override { return "LinearBackward"; }

  void keep(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    x_ = KeptTensor(x);
    weight_ = KeptTensor(weight);
    if (bias.defined()) bias_sizes_ = bias.sizes().vec();
  }

 private:
  KeptTensor x_, weight_;
  std::vector<std::int64_t> bias_sizes_;
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

// Whatever our node does not know: other types, samples without a batch.
at::Tensor run_by_libtorch(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias,
                           const Window& window) {
  const auto& [stride, padding, dilation, groups] = window;
  if (weight.dim() == 3) return at::conv1d(x, weight, bias, stride, padding, dilation, groups);
  if (weight.dim() == 4) return at::conv2d(x, weight, bias, stride, padding, dilation, groups);
  return at::conv3d(x, weight, bias, stride, padding, dilation, groups);
}

at::Tensor run_convolution(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias,
                           const Window& window, bool is_lean) {
  if (is_lean) return ops::convolve(x, weight, bias.value_or(at::Tensor()), window);
  return at::convolution(x, weight, bias, window.stride, window.padding, window.dilation,
                         /*transposed=*/false, window.output_padding(), window.groups);
}

class ConvolutionNode final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) override {
    ops::check_differentiated_once("a convolution");
    at::Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return variable_list(3);
    const std::array<bool, 3> wanted{task_should_compute_output(0), task_should_compute_output(1),
                                     task_should_compute_output(2)};
    const ops::ConvolutionGradients gradients =
        is_lean_ ? ops::convolve_backward(std::move(dy), x_.take(), weight_.get(), window_, wanted)
                 : run_backward(dy, x_.take(), wanted);
    return {gradients.begin(), gradients.end()};
  }

  void release_variables() override {
    x_.release();
    weight_.release();
  }

  std::string name() const override { return "ConvolutionBackward"; }

  void keep(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Window window,
            bool is_lean) {
    x_ = KeptTensor(x);
    weight_ = KeptTensor(weight);
    bias_sizes_ = {bias.defined() ? bias.size(0) : 0};
    window_ = std::move(window);
    is_lean_ = is_lean;
  }

 private:
  // By LibTorch.
  ops::ConvolutionGradients run_backward(const at::Tensor& dy, at::Tensor x,
                                         std::array<bool, 3> wanted) const {
    const at::Tensor weight = weight_.get();
    const auto gradients_of = [&](const at::Tensor& input, std::array<bool, 3> some) {
      return at::convolution_backward(dy, input, weight, bias_sizes_, window_.stride,
                                      window_.padding, window_.dilation, /*transposed=*/false,
                                      window_.output_padding(), window_.groups, some);
    };
    ops::ConvolutionGradients gradients;
    if (wanted[1] || wanted[2]) {
      std::tie(std::ignore, gradients[1], gradients[2]) =
          gradients_of(x, {false, wanted[1], wanted[2]});
    }
    if (wanted[0]) {
      // Depends on the sizes of x, and on no element.
      const at::Tensor layout = without_memory(x);
      x.reset();
      gradients[0] = std::get<0>(gradients_of(layout, {true, false, false}));
    }
    return gradients;
  }

  KeptTensor x_, weight_;
  std::vector<std::int64_t> bias_sizes_;
  Window window_;
  bool is_lean_ = false;
};

class MeanNode final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) override {
    ops::check_differentiated_once("a mean");
    at::Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return variable_list(1);
    std::int64_t count = 1;
    for (std::size_t i = 0; i < dims_.size(); ++i) {
      count *= sizes_[static_cast<std::size_t>(dims_[i])];
      if (!keepdim_) dy = dy.unsqueeze(dims_[i]);  // in order, from the first dimension on
    }
    return {dy.expand(sizes_) / count};
  }

  std::string name() const override { return "MeanBackward"; }

  void keep(const at::Tensor& x, at::IntArrayRef dims, bool keepdim) {
    sizes_ = x.sizes().vec();
    for (const std::int64_t dim : dims) dims_.push_back(at::maybe_wrap_dim(dim, x.dim()));
    std::sort(dims_.begin(), dims_.end());
    keepdim_ = keepdim;
  }

 private:
  std::vector<std::int64_t> sizes_, dims_;
  bool keepdim_ = false;
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
  const auto node = ops::make_node_for<LinearNode>({x, weight, given});
  if (node) node->keep(x, weight, given);
  return with_history(node, [&] { return run_linear(x, weight, given); });
}

at::Tensor matmul_operator(const at::Tensor& a, const at::Tensor& b) {
  const bool is_ours = is_float(a) && is_float(b) && are_equal_batches(a, b);
  if (!is_ours || ops::is_autocast(a)) return at::matmul(a, b);
  return LeanMatmul::apply(a, b);
}

at::Tensor convolution_operator(const at::Tensor& x, const at::Tensor& weight,
                                const MaybeTensor& bias, at::IntArrayRef stride,
                                at::IntArrayRef padding, at::IntArrayRef dilation,
                                std::int64_t groups) {
  const Window window{stride.vec(), padding.vec(), dilation.vec(), groups};
  const at::Tensor given = bias.value_or(at::Tensor());
  const bool is_ours = x.dim() == weight.dim() && x.numel() > 0 && is_float(x) &&
                       is_float(weight) && (!given.defined() || is_float(given));
  if (!is_ours || ops::is_autocast(x)) return run_by_libtorch(x, weight, bias, window);
  const bool is_lean = ops::has_lean_convolution(x, weight, window);
  const auto node = ops::make_node_for<ConvolutionNode>({x, weight, given});
  if (node) node->keep(x, weight, given, window, is_lean);
  return with_history(node, [&] { return run_convolution(x, weight, bias, window, is_lean); });
}

at::Tensor mean_operator(const at::Tensor& x, at::IntArrayRef dims, bool keepdim) {
  if (!is_float(x) || dims.empty() || x.numel() == 0 || ops::is_autocast(x))
    return at::mean(x, dims, keepdim);
  const auto node = ops::make_node_for<MeanNode>({x});
  if (node) node->keep(x, dims, keepdim);
  return with_history(node, [&] { return at::mean(x, dims, keepdim); });
}

TORCH_LIBRARY_FRAGMENT(headroom, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear_operator);
  library.def("matmul(Tensor a, Tensor b) -> Tensor", matmul_operator);
  library.def(
      "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "int[] dilation, int groups) -> Tensor",
      convolution_operator);
  library.def("mean(Tensor x, int[] dims, bool keepdim) -> Tensor", mean_operator);
}

}  // namespace

at::Tensor lean_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linear_operator(x, weight, maybe(bias));
}

at::Tensor lean_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, std::int64_t groups) {
  return convolution_operator(x, weight, maybe(bias), stride, padding, dilation, groups);
}

at::Tensor lean_matmul(const at::Tensor& a, const at::Tensor& b) { return matmul_operator(a, b); }

at::Tensor lean_mean(const at::Tensor& x, at::IntArrayRef dims, bool keepdim) {
  return mean_operator(x, dims, keepdim);
}

}  // namespace headroom
