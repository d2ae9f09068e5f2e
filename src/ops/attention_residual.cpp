#include <headroom/ops/transformer.h>

#include "ops/low_rank.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include "ops/convert.h"
#include "ops/dropout.h"
#include "ops/layer_norm.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call {
  ops::AttentionParams params;
  NormKind norm = NormKind::kLayer;
  double residual_dropout_p = 0.0, norm_eps = 0.0;
  std::int64_t residual_seed = 0;
  bool wants_grad = false, keep_norm = true, keep_qkv = true;
  std::optional<at::ScalarType> kept_type = std::nullopt;
  ops::LowRankCall qkv_adapters = {}, proj_adapters = {};
};

// The first seven are the tensors that autograd knows, in its order; after them it knows those of
// the adapters, which are saved last.
constexpr std::size_t kNumWeights = 7;
enum Saved {
  kX,
  kNormWeight,
  kNormBias,
  kQkvWeight,
  kQkvBias,
  kProjWeight,
  kProjBias,
  kMean,
  kRstd,
  kNorm,
  kQkv,
  kY,
  kSoftmax,
  kKeyMask,
  kAdapters
};

struct AttentionResidual : torch::autograd::Function<AttentionResidual> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                            const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
                            const at::Tensor& proj_weight, const at::Tensor& proj_bias,
                            at::TensorList adapters, const Call& call) {
    const std::int64_t num_samples = x.size(0), length = x.size(1), width = x.size(2),
                       num_rows = num_samples * length, qkv_width = qkv_weight.size(0);
    const bool has_norm = ops::present(norm_weight);
    const at::Tensor rows = x.view({num_rows, width});
    at::Tensor mean, rstd, norm = rows;
    if (has_norm) {
      if (call.norm == NormKind::kLayer) mean = ops::make_floats({num_rows}, x);
      rstd = ops::make_floats({num_rows}, x);
      norm = ops::make_values({num_rows, width}, x);
      ops::layer_norm_forward(rows, norm_weight, norm_bias, call.norm_eps, norm, mean, rstd);
    }
    at::Tensor qkv = ops::make_values({num_samples, length, qkv_width}, x);
    ops::linear(norm, ops::product_weight(qkv_weight, x), qkv.view({num_rows, qkv_width}), 0.0);
    call.qkv_adapters.add(norm, qkv.view({num_rows, qkv_width}));
    if (!call.wants_grad || !call.keep_norm || !has_norm) norm = at::Tensor();
    at::Tensor y = ops::make_values({num_samples, length, proj_weight.size(1)}, x);
    at::Tensor softmax = ops::make_floats({num_samples, call.params.num_heads, 2, length}, x);
    ops::attention_forward(call.params, qkv, qkv_bias, y, softmax);
    if (call.wants_grad && call.keep_qkv && ops::keeps_half(call.kept_type, qkv.numel())) {
      ops::keep_exact(ctx->saved_data, "qkv", convert(qkv, *call.kept_type));
      qkv = at::Tensor();
    }
    if (!call.wants_grad || !call.keep_qkv) qkv = at::Tensor();
    at::Tensor out = at::empty_like(x);
    add_projection(y, ops::product_weight(proj_weight, x), proj_bias, rows, call,
                   out.view({num_rows, width}));
    // What follows keeps it rounded: rounded from the start, it is the same for who recomputes from
    // it.
    if (call.kept_type) round_to(out, *call.kept_type);
    if (call.wants_grad) {
      variable_list tensors = {
          x,  norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias,
          {}, {},          norm,      qkv,        y,        {},          call.params.key_mask};
      tensors.insert(tensors.end(), adapters.begin(), adapters.end());
      save(ctx, std::move(tensors), mean, rstd, softmax, call);
    }
    return out;
  }

  // out = x + dropout(y proj^T + bias)
  static void add_projection(const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias,
                             const at::Tensor& x, const Call& call, const at::Tensor& out) {
    const at::Tensor y_rows = y.view({-1, y.size(2)});
    if (call.residual_dropout_p == 0.0 && out.scalar_type() == at::kFloat) {
      ops::add_bias(x, bias, out);
      ops::linear(y_rows, weight, out, 1.0);
      call.proj_adapters.add(y_rows, out);
    } else {
      // Sums that are rounded are made in one pass: x + bias alone would be rounded as well.
      ops::linear(y_rows, weight, out, 0.0);
      call.proj_adapters.add(y_rows, out);
      ops::dropout_add(ops::dropout_from_seed(call.residual_dropout_p,
                                              static_cast<std::uint64_t>(call.residual_seed)),
                       out, bias, x, out);
    }
  }

  static void save(AutogradContext* ctx, variable_list tensors, const at::Tensor& mean,
                   const at::Tensor& rstd, const at::Tensor& softmax, const Call& call) {
    ctx->save_for_backward(std::move(tensors));
    ops::keep_exact(ctx->saved_data, "mean", mean);
    ops::keep_exact(ctx->saved_data, "rstd", rstd);
    ops::keep_exact(ctx->saved_data, "softmax", softmax);
    ops::keep_type(ctx->saved_data, call.kept_type);
    call.params.keep(ctx->saved_data);
    ctx->saved_data["residual_seed"] = call.residual_seed;
    ctx->saved_data["residual_dropout_p"] = call.residual_dropout_p;
    call.qkv_adapters.keep(ctx->saved_data, "qkv_adapters");
    call.proj_adapters.keep(ctx->saved_data, "proj_adapters");
  }

  // The adapters of both layers again, and where their gradients go.
  struct Adapters {
    Adapters(AutogradContext* ctx, const variable_list& saved)
        : qkv(ctx->saved_data, "qkv_adapters", at::TensorList(saved).slice(kAdapters)),
          proj(ctx->saved_data, "proj_adapters",
               at::TensorList(saved).slice(kAdapters + qkv.num_tensors())) {
      for (std::size_t i = 0; i < qkv.num_tensors() + proj.num_tensors(); ++i) {
        const ops::ParameterGrad gradient(saved[kAdapters + i],
                                          ctx->needs_input_grad(kNumWeights + i));
        (i < qkv.num_tensors() ? qkv_gradients : proj_gradients).push_back(gradient);
        returned.push_back(gradient.returned);
      }
    }
    ops::LowRankCall qkv, proj;
    std::vector<ops::ParameterGrad> qkv_gradients, proj_gradients;
    variable_list returned;
  };

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("attention_residual");
    variable_list saved = ctx->get_saved_variables();
    saved[kMean] = ops::take_exact(ctx->saved_data, "mean");
    saved[kRstd] = ops::take_exact(ctx->saved_data, "rstd");
    saved[kSoftmax] = ops::take_exact(ctx->saved_data, "softmax");
    const at::Tensor dout = grads[0].contiguous();
    const std::int64_t num_samples = dout.size(0), length = dout.size(1), width = dout.size(2),
                       num_rows = num_samples * length, y_width = saved[kProjWeight].size(1);
    const at::Tensor dout_rows = dout.view({num_rows, width}),
                     x_rows = saved[kX].view({num_rows, width});
    const Adapters adapters(ctx, saved);
    variable_list result(kNumWeights);
    result.insert(result.end(), adapters.returned.begin(), adapters.returned.end());
    result.emplace_back();  // of the call
    at::Tensor dy = ops::make_values({num_samples, length, y_width}, dout);
    projection_grads(ctx, saved, adapters, dout_rows, dy.view({num_rows, y_width}), result);
    const bool has_norm = ops::present(saved[kNormWeight]);
    at::Tensor norm = has_norm ? saved[kNorm] : x_rows;
    const auto make_norm = [&] {
      if (norm.defined()) return;
      norm = ops::make_values({num_rows, width}, dout);
      ops::layer_norm_apply(x_rows, saved[kNormWeight], saved[kNormBias], saved[kMean],
                            saved[kRstd], norm);
    };
    at::Tensor half_qkv = ops::take_out(ctx->saved_data, "qkv");
    if (!saved[kQkv].defined() && !half_qkv.defined()) make_norm();
    const at::Tensor dqkv = attention_grad(ctx, saved, adapters.qkv, std::move(half_qkv), norm, dy);
    const at::Tensor dqkv_rows = dqkv.view({num_rows, saved[kQkvWeight].size(0)});
    saved[kY] = at::Tensor();
    const ops::ParameterGrad dqkv_weight(saved[kQkvWeight], ctx->needs_input_grad(kQkvWeight));
    // As late as it can be: attention needs the most memory.
    if (dqkv_weight.wanted() || !adapters.qkv.empty()) make_norm();
    if (dqkv_weight.wanted())
      ops::linear_grad_weight(dqkv_rows, norm, dqkv_weight.gradient, dqkv_weight.beta());
    result[kQkvWeight] = dqkv_weight.returned;
    result[kQkvBias] = bias_grad(ctx, saved, kQkvBias, dqkv_rows);
    adapters.qkv.add_gradients(norm, dqkv_rows, adapters.qkv_gradients);
    if (!needs_gradient_of_input(ctx)) return result;
    // What was the gradient of the heads becomes that of x.
    at::Tensor dx =
        y_width == width ? std::move(dy) : ops::make_values({num_samples, length, width}, dout);
    const at::Tensor dx_rows = dx.view({num_rows, width});
    ops::linear_grad_input(dqkv_rows, ops::product_weight(saved[kQkvWeight], dout), dx_rows);
    adapters.qkv.add_input_gradient(dqkv_rows, dx_rows);
    if (ctx->needs_input_grad(kX)) result[kX] = dx;
    if (!has_norm) {
      if (!dx.is_meta()) dx.add_(dout);
      return result;
    }
    const ops::ParameterGrad dweight(saved[kNormWeight], ctx->needs_input_grad(kNormWeight));
    const ops::ParameterGrad dbias(saved[kNormBias], ctx->needs_input_grad(kNormBias));
    ops::layer_norm_backward(dx_rows, x_rows, saved[kMean], saved[kRstd], saved[kNormWeight],
                             dout_rows, dx_rows, dweight, dbias);
    result[kNormWeight] = dweight.returned;
    result[kNormBias] = dbias.returned;
    return result;
  }

  static at::Tensor bias_grad(AutogradContext* ctx, const variable_list& saved, Saved bias,
                              const at::Tensor& d) {
    const ops::ParameterGrad dbias(saved[bias], ctx->needs_input_grad(bias));
    if (dbias.wanted()) ops::column_sums(d, dbias.gradient, dbias.accumulate);
    return dbias.returned;
  }

  // Of the last layer; dy becomes the gradient of what it is given.
  static void projection_grads(AutogradContext* ctx, const variable_list& saved,
                               const Adapters& adapters, const at::Tensor& dout,
                               const at::Tensor& dy, variable_list& result) {
    at::Tensor d = dout;  // before dropout
    const double p = ctx->saved_data["residual_dropout_p"].toDouble();
    if (p != 0.0) {
      d = at::empty_like(dout);
      const auto seed = static_cast<std::uint64_t>(ctx->saved_data["residual_seed"].toInt());
      ops::dropout_add(ops::dropout_from_seed(p, seed), dout, {}, {}, d);
    }
    const at::Tensor y = saved[kY].view(dy.sizes());
    result[kProjBias] = bias_grad(ctx, saved, kProjBias, d);
    const ops::ParameterGrad dweight(saved[kProjWeight], ctx->needs_input_grad(kProjWeight));
    if (dweight.wanted()) ops::linear_grad_weight(d, y, dweight.gradient, dweight.beta());
    result[kProjWeight] = dweight.returned;
    ops::linear_grad_input(d, ops::product_weight(saved[kProjWeight], d), dy);
    adapters.proj.add_input_gradient(d, dy);
    adapters.proj.add_gradients(y, d, adapters.proj_gradients);
  }

  static bool needs_gradient_of_input(AutogradContext* ctx) {
    return ctx->needs_input_grad(kX) || ctx->needs_input_grad(kNormWeight) ||
           ctx->needs_input_grad(kNormBias);
  }

  // Turns qkv back, or computes it again where it was not kept; its memory then becomes the
  // gradient's.
  static at::Tensor attention_grad(AutogradContext* ctx, const variable_list& saved,
                                   const ops::LowRankCall& adapters, at::Tensor half_qkv,
                                   const at::Tensor& norm, const at::Tensor& dy) {
    const ops::AttentionParams params(ctx->saved_data, saved[kKeyMask]);
    at::Tensor qkv = saved[kQkv], dqkv;
    if (qkv.defined()) {
      dqkv = at::empty_like(qkv);
    } else if (half_qkv.defined()) {
      qkv = dqkv = convert(half_qkv, at::kFloat);
      half_qkv = at::Tensor();
    } else {
      const std::int64_t qkv_width = saved[kQkvWeight].size(0);
      qkv = dqkv = ops::make_values({dy.size(0), dy.size(1), qkv_width}, dy);
      ops::linear(norm, ops::product_weight(saved[kQkvWeight], dy),
                  qkv.view({norm.size(0), qkv_width}), 0.0);
      adapters.add(norm, qkv.view({norm.size(0), qkv_width}));
      ops::round_as_kept(ctx->saved_data, qkv, qkv.numel());
    }
    ops::attention_backward(params, qkv, saved[kQkvBias], saved[kY], saved[kSoftmax], dy, dqkv);
    return dqkv;
  }
};

void check_weights(const at::Tensor& x, const AttentionWeights& weights,
                   const BlockOptions& options) {
  const std::int64_t width = x.size(-1), qkv_width = weights.qkv_weight.size(0);
  ops::check_attention_sizes(x, qkv_width, options.num_heads, options.attention);
  const std::int64_t num_kv_heads = options.attention.num_kv_heads.value_or(options.num_heads),
                     y_width =
                         qkv_width / (options.num_heads + 2 * num_kv_heads) * options.num_heads;
  if (weights.norm_weight.defined()) ops::check_sizes(weights.norm_weight, {width}, "norm_weight");
  ops::check_sizes(weights.qkv_weight, {qkv_width, width}, "qkv_weight");
  ops::check_sizes(weights.proj_weight, {width, y_width}, "proj_weight");
  if (weights.norm_bias.defined()) ops::check_sizes(weights.norm_bias, {width}, "norm_bias");
  if (weights.qkv_bias.defined()) ops::check_sizes(weights.qkv_bias, {qkv_width}, "qkv_bias");
  if (weights.proj_bias.defined()) ops::check_sizes(weights.proj_bias, {width}, "proj_bias");
}

}  // namespace

at::Tensor attention_residual(const at::Tensor& input, const AttentionWeights& weights,
                              const BlockOptions& options) {
  const at::Tensor x = ops::in_compute_type(input);
  check_weights(x, weights, options);
  const ops::LowRankCall qkv_adapters(weights.qkv_adapters, options.adapter_scale,
                                      options.adapter_dropout_p),
      proj_adapters(weights.proj_adapters, options.adapter_scale, options.adapter_dropout_p);
  qkv_adapters.check(weights.qkv_weight.size(1), weights.qkv_weight.size(0), "qkv");
  proj_adapters.check(weights.proj_weight.size(1), weights.proj_weight.size(0), "proj");
  const bool has_adapters = !qkv_adapters.empty() || !proj_adapters.empty();
  if (!ops::has_kernels(x) || (ops::is_autocast(x) && has_adapters)) {
    const at::Tensor norm = weights.norm_weight.defined()
                                ? headroom::norm(options.norm, x, weights.norm_weight,
                                                 weights.norm_bias, options.norm_eps)
                                : x;
    const at::Tensor qkv =
        qkv_adapters.add_plain(norm, ops::plain_linear(norm, weights.qkv_weight, weights.qkv_bias));
    const at::Tensor y = attention(qkv, options.num_heads, options.attention);
    const at::Tensor added =
        proj_adapters.add_plain(y, ops::plain_linear(y, weights.proj_weight, weights.proj_bias));
    return x + dropout(added, options.residual_dropout_p);
  }
  Call call{ops::AttentionParams(options.num_heads, options.attention, x)};
  call.norm = options.norm;
  call.residual_dropout_p = options.residual_dropout_p;
  call.residual_seed =
      static_cast<std::int64_t>(ops::draw_dropout(options.residual_dropout_p).seed);
  call.norm_eps = options.norm_eps;
  call.kept_type = kept_type();
  call.keep_qkv = options.keep < BlockKeep::kNoGeluNormsQkv;
  // Backward reads it for the gradients of the layer's weights, and to make qkv again.
  call.keep_norm = options.keep < BlockKeep::kNoGeluNorms &&
                   (weights.qkv_weight.requires_grad() || !qkv_adapters.empty() || !call.keep_qkv);
  call.qkv_adapters = qkv_adapters;
  call.proj_adapters = proj_adapters;
  std::vector<at::Tensor> adapters;
  qkv_adapters.append_to(adapters);
  proj_adapters.append_to(adapters);
  call.wants_grad = ops::wants_grad({x, weights.norm_weight, weights.norm_bias, weights.qkv_weight,
                                     weights.qkv_bias, weights.proj_weight, weights.proj_bias}) ||
                    ops::wants_grad(adapters);
  return AttentionResidual::apply(
      x.contiguous(), ops::or_empty(weights.norm_weight, x), ops::or_empty(weights.norm_bias, x),
      weights.qkv_weight.contiguous(), ops::or_empty(weights.qkv_bias, x),
      weights.proj_weight.contiguous(), ops::or_empty(weights.proj_bias, x),
      at::TensorList(adapters), call);
}

}  // namespace headroom
