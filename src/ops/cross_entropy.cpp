#include <headroom/ops/transformer.h>

#include "core/parallel.h"
#include "ops/kernels.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of logits that exist at once: fewer would make OpenBLAS pack the weight too often.
std::int64_t chunk_rows(std::int64_t num_classes) { return num_classes <= 16384 ? 512 : 256; }

// What the loss is divided by: 1 for a sum, else the weight of all items that count.
double divisor_of(const at::Tensor& targets, const CrossEntropyOptions& options) {
  if (options.reduction == CrossEntropyOptions::Reduction::kSum || targets.is_meta()) return 1.0;
  const std::int64_t* target = targets.data_ptr<std::int64_t>();
  const float* weight =
      options.item_weights.defined() ? options.item_weights.data_ptr<float>() : nullptr;
  double total = 0.0;
  for (std::int64_t i = 0; i < targets.numel(); ++i) {
    if (target[i] != options.ignore_index) total += weight == nullptr ? 1.0 : weight[i];
  }
  return total;
}

// Which gradients.
struct Wanted {
  bool hidden = false, weight = false, bias = false;
};

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  // hidden (n, C), weight (V, C), bias (V) or empty, targets (n); options.item_weights (n) floats.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& targets, const CrossEntropyOptions& options,
                            const Wanted& wanted) {
    const std::int64_t num_rows = hidden.size(0), num_classes = weight.size(0),
                       rows = std::min(num_rows, chunk_rows(num_classes));
    const bool is_meta = hidden.is_meta(),
               gradients = wanted.hidden || wanted.weight || wanted.bias;
    const auto kind = !gradients                              ? kernels::LogitGradients::kNone
                      : hidden.scalar_type() == at::kBFloat16 ? kernels::LogitGradients::kBf16
                                                              : kernels::LogitGradients::kFloat;
    const double divisor = divisor_of(targets, options);
    const float scale = divisor == 0.0 ? 0.0f : static_cast<float>(1.0 / divisor);
    at::Tensor dhidden = wanted.hidden ? at::empty_like(hidden) : at::Tensor();
    at::Tensor dweight = wanted.weight ? at::empty_like(weight) : at::Tensor();
    at::Tensor dbias = wanted.bias ? at::empty_like(bias) : at::Tensor();
    for (const at::Tensor& gradient : {dweight, dbias}) {
      if (gradient.defined() && num_rows == 0 && !is_meta) gradient.zero_();
    }
    const at::Tensor losses = at::empty({num_rows}, hidden.options().dtype(at::kDouble));
    {
      const at::Tensor product = ops::product_weight(weight, hidden);
      const at::Tensor logits = ops::make_floats({rows, num_classes}, hidden);
      for (std::int64_t begin = 0; begin < num_rows; begin += rows) {
        const std::int64_t count = std::min(rows, num_rows - begin);
        const at::Tensor part = hidden.narrow(0, begin, count), chunk = logits.narrow(0, 0, count);
        ops::linear(part, product, chunk, 0.0);
        if (!is_meta) losses_of(chunk, bias, targets, options, scale, kind, losses, begin);
        const at::Tensor dlogits = kind == kernels::LogitGradients::kBf16
                                       ? chunk.view(at::kBFloat16).narrow(1, 0, num_classes)
                                       : chunk;
        if (wanted.hidden)
          ops::linear_grad_input(dlogits, product, dhidden.narrow(0, begin, count));
        if (wanted.weight) ops::linear_grad_weight(dlogits, part, dweight, begin == 0 ? 0.0 : 1.0);
        if (wanted.bias) ops::column_sums(dlogits, dbias, begin != 0);
      }
    }
    if (gradients) {
      ctx->saved_data["dhidden"] = dhidden;
      ctx->saved_data["dweight"] = dweight;
      ctx->saved_data["dbias"] = dbias;
    }
    at::Tensor loss = ops::make_floats({}, hidden);
    if (!is_meta) {
      const double* each = losses.data_ptr<double>();
      double sum = 0.0;
      for (std::int64_t i = 0; i < num_rows; ++i) sum += each[i];
      loss.fill_(divisor == 0.0 ? std::numeric_limits<double>::quiet_NaN() : sum / divisor);
    }
    return loss;
  }

  static void losses_of(const at::Tensor& logits, const at::Tensor& bias, const at::Tensor& targets,
                        const CrossEntropyOptions& options, float scale,
                        kernels::LogitGradients gradients, const at::Tensor& losses,
                        std::int64_t begin) {
    const std::int64_t* target = targets.data_ptr<std::int64_t>() + begin;
    const float* weights =
        options.item_weights.defined() ? options.item_weights.data_ptr<float>() + begin : nullptr;
    const float* added = ops::present(bias) ? bias.data_ptr<float>() : nullptr;
    float* p = logits.data_ptr<float>();
    double* loss = losses.data_ptr<double>() + begin;
    parallel_for(0, logits.size(0), 1, [&](std::int64_t first, std::int64_t last) {
      kernels::cross_entropy_rows(p, added, target, weights, options.ignore_index, scale, gradients,
                                  loss, first, last, logits.size(1));
    });
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("linear_cross_entropy");
    const auto found = ctx->saved_data.find("dhidden");
    TORCH_CHECK(
        found != ctx->saved_data.end(),
        "linear_cross_entropy keeps its gradients for one backward only; run forward again");
    variable_list result(6);
    std::size_t index = 0;
    for (const char* name : {"dhidden", "dweight", "dbias"}) {
      const c10::IValue& kept = ctx->saved_data[name];
      if (!kept.isNone()) result[index] = kept.toTensor();
      ++index;
    }
    // Given away, not shared: a weight's first gradient then becomes its .grad without a copy.
    ctx->saved_data.clear();
    if (!grads[0].is_meta() && grads[0].item<float>() != 1.0f) {
      for (at::Tensor& gradient : result) {
        if (gradient.defined()) gradient.mul_(grads[0]);
      }
    }
    return result;
  }
};

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& targets, const CrossEntropyOptions& options) {
  const at::Tensor hidden = ops::in_compute_type(input);
  ops::check_sizes(weight, {weight.size(0), hidden.size(-1)}, "the weight of linear_cross_entropy");
  ops::check_sizes(targets, hidden.sizes().slice(0, static_cast<std::size_t>(hidden.dim() - 1)),
                   "targets");
  if (options.item_weights.defined())
    ops::check_sizes(options.item_weights, targets.sizes(), "item_weights");
  if (options.bias.defined())
    ops::check_sizes(options.bias, {weight.size(0)}, "the bias of linear_cross_entropy");
  ops::check_range(targets, weight.size(0), options.ignore_index, "target");
  if (!ops::has_kernels(hidden))
    return ops::plain_linear_cross_entropy(hidden, weight, targets, options);
  CrossEntropyOptions flat = options;
  if (flat.item_weights.defined())
    flat.item_weights =
        options.item_weights.detach().to(hidden.device(), at::kFloat).reshape({-1}).contiguous();
  flat.bias = at::Tensor();  // autograd must be given it
  const Wanted wanted{ops::wants_grad({hidden}), ops::wants_grad({weight}),
                      ops::wants_grad({options.bias})};
  return LinearCrossEntropy::apply(hidden.reshape({-1, hidden.size(-1)}).contiguous(),
                                   weight.contiguous(), ops::or_empty(options.bias, hidden),
                                   targets.reshape({-1}).contiguous(), flat, wanted);
}

}  // namespace headroom
