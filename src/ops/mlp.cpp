#include <headroom/ops/transformer.h>

#include <headroom/core/error.h>

#include "ops/low_rank.h"
#include "ops/mlp_passes.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include "ops/convert.h"
#include "ops/dropout.h"
#include "ops/layer_norm.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace headroom {
namespace {

using namespace ops::mlp;

// For a batch without rows, which adds nothing.
void write_zeros(const ops::ParameterGrad& grad) {
  if (grad.wanted() && !grad.accumulate && !grad.gradient.is_meta())
    at::Tensor(grad.gradient).zero_();
}

struct Mlp : torch::autograd::Function<Mlp> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                            const at::Tensor& hidden_weight, const at::Tensor& hidden_bias,
                            const at::Tensor& out_weight, const at::Tensor& out_bias,
                            at::TensorList adapters, const Call& call) {
    const MlpWeights weights{norm_weight, norm_bias,  hidden_weight,
                             hidden_bias, out_weight, out_bias};
    const std::int64_t width = x.size(-1), num_rows = width == 0 ? 0 : x.numel() / width;
    const at::Tensor rows = x.view({num_rows, width});
    const Kept kept(rows, weights, call);
    at::Tensor out = at::empty_like(x);
    const at::Tensor out_rows = out.view({num_rows, width});
    ForwardPass(rows, weights, call, kept, out_rows).run();
    if (call.wants_grad) {
      variable_list tensors = {x,           norm_weight, norm_bias,   hidden_weight,
                               hidden_bias, out_weight,  out_bias,    {},
                               {},          kept.norm,   kept.hidden, kept.active};
      tensors.insert(tensors.end(), adapters.begin(), adapters.end());
      save(ctx, std::move(tensors), kept, call);
    }
    return out;
  }

  static void save(AutogradContext* ctx, variable_list tensors, const Kept& kept,
                   const Call& call) {
    ctx->save_for_backward(std::move(tensors));
    ops::keep_exact(ctx->saved_data, "mean", kept.mean);
    ops::keep_exact(ctx->saved_data, "rstd", kept.rstd);
    ops::keep_exact(ctx->saved_data, "hidden", kept.half_hidden);
    ops::keep_type(ctx->saved_data, call.kept_type);
    ctx->saved_data["gated"] = call.activation.gated;
    ctx->saved_data["gelu"] = static_cast<std::int64_t>(call.activation.gelu);
    ctx->saved_data["residual"] = static_cast<std::int64_t>(call.residual);
    ctx->saved_data["dropout_p"] = call.dropout_p;
    ctx->saved_data["seed"] = call.seed;
    call.hidden_adapters.keep(ctx->saved_data, "hidden_adapters");
    call.out_adapters.keep(ctx->saved_data, "out_adapters");
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("mlp");
    variable_list saved = ctx->get_saved_variables();
    saved[kMean] = ops::take_exact(ctx->saved_data, "mean");
    saved[kRstd] = ops::take_exact(ctx->saved_data, "rstd");
    const at::Tensor dout = grads[0].contiguous();
    const std::int64_t width = saved[kX].size(-1);
    const std::int64_t num_rows = width == 0 ? 0 : dout.numel() / width;
    const at::Tensor rows = saved[kX].view({num_rows, width}),
                     dout_rows = dout.view({num_rows, width});
    at::Tensor d = dout_rows;  // before dropout
    if (const double p = ctx->saved_data["dropout_p"].toDouble(); p != 0.0) {
      d = at::empty_like(dout_rows);
      const auto seed = static_cast<std::uint64_t>(ctx->saved_data["seed"].toInt());
      ops::dropout_add(ops::dropout_from_seed(p, seed), dout_rows, {}, {}, d);
    }
    const Adapters adapters(ctx, saved);
    variable_list result(kNumWeights);
    result.insert(result.end(), adapters.returned.begin(), adapters.returned.end());
    result.emplace_back();  // of the call
    const ops::ParameterGrad dbias(saved[kOutBias], ctx->needs_input_grad(kOutBias));
    if (dbias.wanted()) ops::column_sums(d, dbias.gradient, dbias.accumulate);
    result[kOutBias] = dbias.returned;
    const bool needs_input = ctx->needs_input_grad(kX) || ctx->needs_input_grad(kNormWeight) ||
                             ctx->needs_input_grad(kNormBias);
    at::Tensor dx = needs_input ? at::empty_like(dout) : at::Tensor();
    const at::Tensor dx_rows = needs_input ? dx.view({num_rows, width}) : dx;
    layer_grads(ctx, saved, adapters, rows, d, dx_rows, result);
    if (!needs_input) return result;
    d = at::Tensor();
    finish_input_grad(ctx, saved, rows, dout_rows, dx_rows, result);
    if (ctx->needs_input_grad(kX)) result[kX] = dx;
    return result;
  }

  // Both layers, their adapters and the activation between them.
  static void layer_grads(AutogradContext* ctx, const variable_list& saved,
                          const Adapters& adapters, const at::Tensor& rows, const at::Tensor& d,
                          const at::Tensor& dx, variable_list& result) {
    const LayerGrads grads(ctx, saved);
    result[kHiddenWeight] = grads.hidden_weight.returned;
    result[kHiddenBias] = grads.hidden_bias.returned;
    result[kOutWeight] = grads.out_weight.returned;
    if (rows.size(0) == 0) {
      for (const ops::ParameterGrad* grad :
           {&grads.hidden_weight, &grads.hidden_bias, &grads.out_weight})
        write_zeros(*grad);
      for (const auto* gradients : {&adapters.hidden_gradients, &adapters.out_gradients}) {
        for (const ops::ParameterGrad& grad : *gradients) write_zeros(grad);
      }
    }
    BackwardPass(ctx, saved, adapters, grads, rows, d, dx).run();
  }

  // Through the norm and the residual, in place.
  static void finish_input_grad(AutogradContext* ctx, const variable_list& saved,
                                const at::Tensor& rows, const at::Tensor& dout,
                                const at::Tensor& dx, variable_list& result) {
    const auto residual = static_cast<Residual>(ctx->saved_data["residual"].toInt());
    const bool has_norm = ops::present(saved[kNormWeight]);
    if ((residual == Residual::kNorm || (residual == Residual::kInput && !has_norm)) &&
        !dx.is_meta())
      at::Tensor(dx).add_(dout);
    if (!has_norm) return;
    const ops::ParameterGrad dweight(saved[kNormWeight], ctx->needs_input_grad(kNormWeight));
    const ops::ParameterGrad dbias(saved[kNormBias], ctx->needs_input_grad(kNormBias));
    ops::layer_norm_backward(dx, rows, saved[kMean], saved[kRstd], saved[kNormWeight],
                             residual == Residual::kInput ? dout : at::Tensor(), dx, dweight,
                             dbias);
    result[kNormWeight] = dweight.returned;
    result[kNormBias] = dbias.returned;
  }
};

void check_weights(const at::Tensor& x, const MlpWeights& weights, const Activation& activation) {
  const std::int64_t width = x.size(-1), hidden_width = weights.hidden_weight.size(0),
                     active_width = activation.width(hidden_width);
  if (activation.gated && hidden_width % 2 != 0)
    throw ConfigError(fmt::format(
        "hidden_weight has {} rows, but must have as many of gate as of up", hidden_width));
  ops::check_sizes(weights.hidden_weight, {hidden_width, width}, "hidden_weight");
  ops::check_sizes(weights.out_weight, {width, active_width}, "out_weight");
  if (weights.norm_weight.defined()) ops::check_sizes(weights.norm_weight, {width}, "norm_weight");
  if (weights.norm_bias.defined()) ops::check_sizes(weights.norm_bias, {width}, "norm_bias");
  if (weights.hidden_bias.defined())
    ops::check_sizes(weights.hidden_bias, {hidden_width}, "hidden_bias");
  if (weights.out_bias.defined()) ops::check_sizes(weights.out_bias, {width}, "out_bias");
}

at::Tensor run(const at::Tensor& input, const MlpWeights& weights, const BlockOptions& options,
               Residual residual) {
  const at::Tensor x = ops::in_compute_type(input);
  const Activation activation{options.gated, options.gelu};
  check_weights(x, weights, activation);
  const ops::LowRankCall hidden_adapters(weights.hidden_adapters, options.adapter_scale,
                                         options.adapter_dropout_p),
      out_adapters(weights.out_adapters, options.adapter_scale, options.adapter_dropout_p);
  hidden_adapters.check(weights.hidden_weight.size(1), weights.hidden_weight.size(0), "hidden");
  out_adapters.check(weights.out_weight.size(1), weights.out_weight.size(0), "out");
  const bool has_adapters = !hidden_adapters.empty() || !out_adapters.empty();
  if (!ops::has_kernels(x) || (ops::is_autocast(x) && has_adapters)) {
    const at::Tensor norm = weights.norm_weight.defined()
                                ? headroom::norm(options.norm, x, weights.norm_weight,
                                                 weights.norm_bias, options.norm_eps)
                                : x;
    const at::Tensor hidden = hidden_adapters.add_plain(
        norm, ops::plain_linear(norm, weights.hidden_weight, weights.hidden_bias));
    const at::Tensor active =
        options.gated ? ops::plain_swiglu(hidden) : ops::plain_gelu(hidden, options.gelu);
    const at::Tensor out =
        dropout(out_adapters.add_plain(
                    active, ops::plain_linear(active, weights.out_weight, weights.out_bias)),
                options.residual_dropout_p);
    return residual == Residual::kNone ? out : (residual == Residual::kNorm ? norm : x) + out;
  }
  Call call;
  call.activation = activation;
  call.norm = options.norm;
  call.dropout_p = options.residual_dropout_p;
  call.seed = static_cast<std::int64_t>(ops::draw_dropout(options.residual_dropout_p).seed);
  call.norm_eps = options.norm_eps;
  call.kept_type = kept_type();
  call.residual = residual;
  // Backward reads them for the gradients of the layers' weights.
  call.keep_activation = options.keep < BlockKeep::kNoGelu &&
                         (weights.out_weight.requires_grad() || !out_adapters.empty());
  call.keep_norm = options.keep < BlockKeep::kNoGeluNorms &&
                   (weights.hidden_weight.requires_grad() || !hidden_adapters.empty());
  call.keep_hidden = options.keep < BlockKeep::kAttention;
  call.hidden_adapters = hidden_adapters;
  call.out_adapters = out_adapters;
  std::vector<at::Tensor> adapters;
  hidden_adapters.append_to(adapters);
  out_adapters.append_to(adapters);
  call.wants_grad =
      ops::wants_grad({x, weights.norm_weight, weights.norm_bias, weights.hidden_weight,
                       weights.hidden_bias, weights.out_weight, weights.out_bias}) ||
      ops::wants_grad(adapters);
  return Mlp::apply(x.contiguous(), ops::or_empty(weights.norm_weight, x),
                    ops::or_empty(weights.norm_bias, x), weights.hidden_weight.contiguous(),
                    ops::or_empty(weights.hidden_bias, x), weights.out_weight.contiguous(),
                    ops::or_empty(weights.out_bias, x), at::TensorList(adapters), call);
}

}  // namespace

at::Tensor mlp_residual(const at::Tensor& x, const MlpWeights& weights,
                        const BlockOptions& options) {
  return run(x, weights, options, Residual::kInput);
}

at::Tensor mlp(const at::Tensor& x, const MlpWeights& weights, const BlockOptions& options) {
  MlpWeights without_norm = weights;
  without_norm.norm_weight = without_norm.norm_bias = at::Tensor();
  return run(x, without_norm, options, Residual::kNone);
}

at::Tensor transformer_block(const at::Tensor& x, const AttentionWeights& attention,
                             const MlpWeights& mlp, const BlockOptions& options) {
  return mlp_residual(attention_residual(x, attention, options), mlp, options);
}

// The norm between the halves belongs to the second here: that recomputes it where it is not kept,
// and adds to it.
at::Tensor post_norm_block(const at::Tensor& x, const AttentionWeights& attention,
                           const MlpWeights& mlp, const BlockOptions& options) {
  AttentionWeights first = attention;
  first.norm_weight = first.norm_bias = at::Tensor();
  MlpWeights second = mlp;
  second.norm_weight = attention.norm_weight;
  second.norm_bias = attention.norm_bias;
  const at::Tensor sum =
      run(attention_residual(x, first, options), second, options, Residual::kNorm);
  return norm(options.norm, sum, mlp.norm_weight, mlp.norm_bias, options.norm_eps);
}

const std::vector<std::string>& block_keep_names(bool gated) {
  static const std::vector<std::string> names{"keep", "no_gelu", "no_gelu_norms",
                                              "no_gelu_norms_qkv", "attention"};
  static const std::vector<std::string> gated_names{"keep", "no_product", "no_product_norms",
                                                    "no_product_norms_qkv", "attention"};
  return gated ? gated_names : names;
}

}  // namespace headroom
