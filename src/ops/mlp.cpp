#include <headroom/ops/transformer.h>

#include <headroom/core/error.h>

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
#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the output of the MLP is added to.
enum class Residual : int { kNone, kInput, kNorm };

// What is between the hidden layer and the output: a GELU, or the product of gate and up, which is
// half as wide as the hidden layer.
struct Activation {
  bool gated = false;
  GeluKind gelu = GeluKind::kTanh;

  std::int64_t width(std::int64_t hidden_width) const {
    return gated ? hidden_width / 2 : hidden_width;
  }
  // The place in a row of the hidden layer, or of its gradient, that the activation, or its
  // gradient, can take.
  at::Tensor within(const at::Tensor& hidden) const {
    return gated ? hidden.narrow(1, 0, hidden.size(1) / 2) : hidden;
  }
  // y, which may be within(h), becomes the activation.
  void forward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& y) const {
    if (gated) {
      ops::swiglu_forward(h, bias, y);
    } else {
      ops::bias_gelu_forward(gelu, h, bias, y);
    }
  }
  // within(d) is given the gradient of the activation; d becomes that of the hidden layer.
  void backward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& d,
                const at::Tensor& y, const at::Tensor& dbias, bool accumulate) const {
    if (gated) {
      ops::swiglu_backward(h, bias, d, y, dbias, accumulate);
    } else {
      ops::bias_gelu_backward(gelu, h, bias, d, y, dbias, accumulate);
    }
  }
};

struct Call {
  Activation activation;
  NormKind norm = NormKind::kLayer;
  double dropout_p = 0.0, norm_eps = 0.0;
  std::int64_t seed = 0;
  Residual residual = Residual::kNone;
  bool wants_grad = false, keep_norm = true, keep_hidden = true, keep_activation = true;
  std::optional<at::ScalarType> kept_type;
  ops::LowRankCall hidden_adapters, out_adapters;
};

// The first seven are the tensors that autograd knows, in its order; after them it knows those of
// the adapters, which are saved last.
constexpr std::size_t kNumWeights = 7;
enum Saved {
  kX,
  kNormWeight,
  kNormBias,
  kHiddenWeight,
  kHiddenBias,
  kOutWeight,
  kOutBias,
  kMean,
  kRstd,
  kNorm,
  kHidden,
  kActivation,
  kAdapters
};

// The wide layer goes through in pieces of about a thousand rows: what is not kept exists for one
// piece only, and matrix products of that size lose nothing. The pieces depend on the number of
// rows alone, so that all ways of keeping give the same bits.
struct Pieces {
  explicit Pieces(std::int64_t count) : num_rows(count) {
    const std::int64_t num_pieces = std::max<std::int64_t>(1, num_rows / 1024);
    rows = std::max<std::int64_t>(1, (num_rows + num_pieces - 1) / num_pieces);
  }
  std::int64_t num_rows, rows = 1;
};

// Rows [begin, begin + count) of a kept tensor, or the first rows of the buffer that stands in for
// it.
at::Tensor piece(const at::Tensor& kept, const at::Tensor& buffer, std::int64_t begin,
                 std::int64_t count) {
  return kept.defined() ? kept.narrow(0, begin, count) : buffer.narrow(0, 0, count);
}

// Rows [begin, begin + count); undefined stays undefined.
at::Tensor part(const at::Tensor& tensor, std::int64_t begin, std::int64_t count) {
  return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
}

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
    const std::int64_t width = x.size(-1), hidden_width = hidden_weight.size(0),
                       num_rows = width == 0 ? 0 : x.numel() / width;
    const Pieces pieces(num_rows);
    const std::int64_t most = std::min(num_rows, pieces.rows);
    const bool has_norm = ops::present(norm_weight), wants = call.wants_grad;
    const auto full = [&](bool keep, std::int64_t columns) {
      return keep ? ops::make_values({num_rows, columns}, x) : at::Tensor();
    };
    const auto buffer = [&](bool needed, std::int64_t columns) {
      return needed ? ops::make_values({most, columns}, x) : at::Tensor();
    };
    const auto row_floats = [&](bool needed) {
      return needed ? ops::make_floats({num_rows, 1}, x) : at::Tensor();
    };
    const at::Tensor rows = x.view({num_rows, width});
    const at::Tensor mean = row_floats(has_norm && call.norm == NormKind::kLayer),
                     rstd = row_floats(has_norm);
    const at::Tensor norm = full(has_norm && wants && call.keep_norm, width);
    const bool halves =
        wants && call.keep_hidden && ops::keeps_half(call.kept_type, num_rows * hidden_width);
    const at::Tensor hidden = full(wants && call.keep_hidden && !halves, hidden_width);
    const at::Tensor half_hidden =
        halves ? at::empty({num_rows, hidden_width},
                           x.options().dtype(*call.kept_type).requires_grad(false))
               : at::Tensor();
    const std::int64_t active_width = call.activation.width(hidden_width);
    const at::Tensor active = full(wants && call.keep_activation, active_width);
    at::Tensor out = at::empty_like(x);
    const at::Tensor out_rows = out.view({num_rows, width});
    {
      const at::Tensor hidden_product = ops::product_weight(hidden_weight, x),
                       out_product = ops::product_weight(out_weight, x);
      const at::Tensor norm_piece = buffer(has_norm && !norm.defined(), width);
      // Where the hidden layer is not kept, its activation takes its place, or a GELU that is kept
      // gives it one.
      const at::Tensor hidden_piece =
          buffer(!hidden.defined() && (call.activation.gated || !active.defined()), hidden_width);
      const at::Tensor active_piece = buffer(hidden.defined() && !active.defined(), active_width);
      for (std::int64_t begin = 0; begin < num_rows; begin += pieces.rows) {
        const std::int64_t count = std::min(pieces.rows, num_rows - begin);
        const at::Tensor in = rows.narrow(0, begin, count);
        at::Tensor normed = in;
        if (has_norm) {
          normed = piece(norm, norm_piece, begin, count);
          ops::layer_norm_forward(in, norm_weight, norm_bias, call.norm_eps, normed,
                                  part(mean, begin, count), part(rstd, begin, count));
        }
        const at::Tensor h = !hidden.defined() && !hidden_piece.defined()
                                 ? active.narrow(0, begin, count)
                                 : piece(hidden, hidden_piece, begin, count);
        const at::Tensor a = active.defined() || active_piece.defined()
                                 ? piece(active, active_piece, begin, count)
                                 : call.activation.within(h);
        ops::linear(normed, hidden_product, h, 0.0);
        call.hidden_adapters.add(normed, h, begin);
        if (halves) convert_out(h, half_hidden.narrow(0, begin, count));
        call.activation.forward(h, hidden_bias, a);
        add_output(a, out_product, out_bias, call.residual == Residual::kNorm ? normed : in, call,
                   begin, out_rows.narrow(0, begin, count));
      }
    }
    if (wants) {
      variable_list tensors = {x,           norm_weight, norm_bias, hidden_weight,
                               hidden_bias, out_weight,  out_bias,  {},
                               {},          norm,        hidden,    active};
      tensors.insert(tensors.end(), adapters.begin(), adapters.end());
      ctx->save_for_backward(std::move(tensors));
      ops::keep_exact(ctx->saved_data, "mean", mean);
      ops::keep_exact(ctx->saved_data, "rstd", rstd);
      ops::keep_exact(ctx->saved_data, "hidden", half_hidden);
      ops::keep_type(ctx->saved_data, call.kept_type);
      ctx->saved_data["gated"] = call.activation.gated;
      ctx->saved_data["gelu"] = static_cast<std::int64_t>(call.activation.gelu);
      ctx->saved_data["residual"] = static_cast<std::int64_t>(call.residual);
      ctx->saved_data["dropout_p"] = call.dropout_p;
      ctx->saved_data["seed"] = call.seed;
      call.hidden_adapters.keep(ctx->saved_data, "hidden_adapters");
      call.out_adapters.keep(ctx->saved_data, "out_adapters");
    }
    return out;
  }

  // out = x, where there is a residual, + dropout(active out_weight^T + bias)
  static void add_output(const at::Tensor& active, const at::Tensor& weight, const at::Tensor& bias,
                         const at::Tensor& x, const Call& call, std::int64_t first_row,
                         const at::Tensor& out) {
    const bool has_residual = call.residual != Residual::kNone;
    if (has_residual && call.dropout_p == 0.0 && out.scalar_type() == at::kFloat) {
      ops::add_bias(x, bias, out);
      ops::linear(active, weight, out, 1.0);
      call.out_adapters.add(active, out, first_row);
      return;
    }
    ops::linear(active, weight, out, 0.0);
    call.out_adapters.add(active, out, first_row);
    // Sums that are rounded are made in one pass: x + bias alone would be rounded as well.
    if (call.dropout_p != 0.0 || has_residual) {
      const kernels::Dropout dropout =
          ops::dropout_from_seed(call.dropout_p, static_cast<std::uint64_t>(call.seed));
      ops::dropout_add(dropout, out, bias, has_residual ? x : at::Tensor(), out, first_row);
    } else if (ops::present(bias)) {
      ops::add_bias(out, bias, out);
    }
  }

  // The adapters of both layers again, and where their gradients go.
  struct Adapters {
    Adapters(AutogradContext* ctx, const variable_list& saved)
        : hidden(ctx->saved_data, "hidden_adapters", at::TensorList(saved).slice(kAdapters)),
          out(ctx->saved_data, "out_adapters",
              at::TensorList(saved).slice(kAdapters + hidden.num_tensors())) {
      for (std::size_t i = 0; i < hidden.num_tensors() + out.num_tensors(); ++i) {
        const ops::ParameterGrad gradient(saved[kAdapters + i],
                                          ctx->needs_input_grad(kNumWeights + i));
        (i < hidden.num_tensors() ? hidden_gradients : out_gradients).push_back(gradient);
        returned.push_back(gradient.returned);
      }
    }
    ops::LowRankCall hidden, out;
    std::vector<ops::ParameterGrad> hidden_gradients, out_gradients;
    variable_list returned;
  };

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
    hidden_grads(ctx, saved, adapters, rows, d, dx_rows, result);
    if (!needs_input) return result;
    d = at::Tensor();
    finish_input_grad(ctx, saved, rows, dout_rows, dx_rows, result);
    if (ctx->needs_input_grad(kX)) result[kX] = dx;
    return result;
  }

  // Writes the gradients of both weights, of the hidden bias and of the adapters, and into `dx`,
  // where it is defined, the gradient of what the hidden layer is given.
  static void hidden_grads(AutogradContext* ctx, const variable_list& saved,
                           const Adapters& adapters, const at::Tensor& rows, const at::Tensor& d,
                           const at::Tensor& dx, variable_list& result) {
    const Activation activation{ctx->saved_data["gated"].toBool(),
                                static_cast<GeluKind>(ctx->saved_data["gelu"].toInt())};
    const ops::ParameterGrad dhidden_weight(saved[kHiddenWeight],
                                            ctx->needs_input_grad(kHiddenWeight));
    const ops::ParameterGrad dhidden_bias(saved[kHiddenBias], ctx->needs_input_grad(kHiddenBias));
    const ops::ParameterGrad dout_weight(saved[kOutWeight], ctx->needs_input_grad(kOutWeight));
    result[kHiddenWeight] = dhidden_weight.returned;
    result[kHiddenBias] = dhidden_bias.returned;
    result[kOutWeight] = dout_weight.returned;
    const std::int64_t num_rows = rows.size(0), width = rows.size(1),
                       hidden_width = saved[kHiddenWeight].size(0);
    if (num_rows == 0) {
      for (const ops::ParameterGrad* grad : {&dhidden_weight, &dhidden_bias, &dout_weight})
        write_zeros(*grad);
      for (const auto* gradients : {&adapters.hidden_gradients, &adapters.out_gradients}) {
        for (const ops::ParameterGrad& grad : *gradients) write_zeros(grad);
      }
    }
    const Pieces pieces(num_rows);
    const std::int64_t most = std::min(num_rows, pieces.rows);
    const bool has_norm = ops::present(saved[kNormWeight]);
    const at::Tensor dhidden = ops::make_values({most, hidden_width}, d);
    const at::Tensor hidden_product = ops::product_weight(saved[kHiddenWeight], d),
                     out_product = ops::product_weight(saved[kOutWeight], d);
    const at::Tensor half_hidden = ops::take_out(ctx->saved_data, "hidden");
    const bool reads_norm = dhidden_weight.wanted() || !adapters.hidden.empty() ||
                            (!saved[kHidden].defined() && !half_hidden.defined()),
               reads_active = dout_weight.wanted() || !adapters.out.empty();
    const bool makes_norm = has_norm && reads_norm && !saved[kNorm].defined();
    const at::Tensor norm_piece = makes_norm ? ops::make_values({most, width}, d) : at::Tensor();
    const at::Tensor hidden_piece =
        saved[kHidden].defined() ? at::Tensor() : ops::make_values({most, hidden_width}, d);
    // Where the hidden layer is in a buffer of ours, its activation takes its place.
    const bool reuses = !saved[kHidden].defined() && !saved[kActivation].defined();
    const at::Tensor active_piece =
        saved[kActivation].defined() || reuses || !reads_active
            ? at::Tensor()
            : ops::make_values({most, activation.width(hidden_width)}, d);
    for (std::int64_t begin = 0; begin < num_rows; begin += pieces.rows) {
      const std::int64_t count = std::min(pieces.rows, num_rows - begin);
      const at::Tensor d_piece = d.narrow(0, begin, count), dh = dhidden.narrow(0, 0, count);
      at::Tensor normed = rows.narrow(0, begin, count);
      if (has_norm && reads_norm) {
        normed = piece(saved[kNorm], norm_piece, begin, count);
        if (makes_norm) {
          ops::layer_norm_apply(rows.narrow(0, begin, count), saved[kNormWeight], saved[kNormBias],
                                part(saved[kMean], begin, count), part(saved[kRstd], begin, count),
                                normed);
        }
      }
      const at::Tensor h = piece(saved[kHidden], hidden_piece, begin, count);
      const at::Tensor a = !reads_active ? at::Tensor()
                           : reuses      ? activation.within(h)
                                         : piece(saved[kActivation], active_piece, begin, count);
      if (half_hidden.defined()) {
        convert_out(half_hidden.narrow(0, begin, count), h);
      } else if (!saved[kHidden].defined()) {
        ops::linear(normed, hidden_product, h, 0.0);
        adapters.hidden.add(normed, h, begin);
        ops::round_as_kept(ctx->saved_data, h, num_rows * hidden_width);
      }
      const at::Tensor da = activation.within(dh);
      ops::linear_grad_input(d_piece, out_product, da);
      adapters.out.add_input_gradient(d_piece, da, begin);
      activation.backward(h, saved[kHiddenBias], dh,
                          saved[kActivation].defined() ? at::Tensor() : a, dhidden_bias.gradient,
                          begin != 0 || dhidden_bias.accumulate);
      adapters.out.add_gradients(a, d_piece, adapters.out_gradients, begin);
      adapters.hidden.add_gradients(normed, dh, adapters.hidden_gradients, begin);
      if (dout_weight.wanted())
        ops::linear_grad_weight(d_piece, a, dout_weight.gradient,
                                begin == 0 ? dout_weight.beta() : 1.0);
      if (dhidden_weight.wanted()) {
        ops::linear_grad_weight(dh, normed, dhidden_weight.gradient,
                                begin == 0 ? dhidden_weight.beta() : 1.0);
      }
      if (!dx.defined()) continue;
      const at::Tensor dx_piece = dx.narrow(0, begin, count);
      ops::linear_grad_input(dh, hidden_product, dx_piece);
      adapters.hidden.add_input_gradient(dh, dx_piece, begin);
    }
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
