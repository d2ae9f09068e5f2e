#include "ops/mlp_passes.h"

#include "ops/convert.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace headroom::ops::mlp {

at::Tensor Activation::within(const at::Tensor& hidden) const {
  return gated ? hidden.narrow(1, 0, hidden.size(1) / 2) : hidden;
}

void Activation::forward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& y) const {
  if (gated) {
    swiglu_forward(h, bias, y);
  } else {
    bias_gelu_forward(gelu, h, bias, y);
  }
}

void Activation::backward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& d,
                          const at::Tensor& y, const at::Tensor& dbias, bool accumulate) const {
  if (gated) {
    swiglu_backward(h, bias, d, y, dbias, accumulate);
  } else {
    bias_gelu_backward(gelu, h, bias, d, y, dbias, accumulate);
  }
}

Pieces::Pieces(std::int64_t num_rows) : num_rows_(num_rows) {
  const std::int64_t num_pieces = std::max<std::int64_t>(1, num_rows / 1024);
  most_rows_ = std::max<std::int64_t>(1, (num_rows + num_pieces - 1) / num_pieces);
}

at::Tensor Pieces::buffer(bool needed, std::int64_t width, const at::Tensor& like) const {
  return needed ? make_values({std::min(num_rows_, most_rows_), width}, like) : at::Tensor();
}

Kept::Kept(const at::Tensor& x, const MlpWeights& weights, const Call& call) {
  const std::int64_t num_rows = x.size(0), hidden_width = weights.hidden_weight.size(0);
  const bool has_norm = present(weights.norm_weight);
  const auto values = [&](bool keep, std::int64_t width) {
    return keep && call.wants_grad ? make_values({num_rows, width}, x) : at::Tensor();
  };
  const auto floats = [&](bool needed) {
    return needed ? make_floats({num_rows, 1}, x) : at::Tensor();
  };
  mean = floats(has_norm && call.norm == NormKind::kLayer);
  rstd = floats(has_norm);
  norm = values(has_norm && call.keep_norm, x.size(1));
  const bool halves =
      call.wants_grad && call.keep_hidden && keeps_half(call.kept_type, num_rows * hidden_width);
  hidden = values(call.keep_hidden && !halves, hidden_width);
  if (halves) {
    half_hidden = at::empty({num_rows, hidden_width},
                            x.options().dtype(*call.kept_type).requires_grad(false));
  }
  active = values(call.keep_activation, call.activation.width(hidden_width));
}

ForwardPass::ForwardPass(const at::Tensor& x, const MlpWeights& weights, const Call& call,
                         const Kept& kept, const at::Tensor& out)
    : x_(x),
      weights_(weights),
      call_(call),
      kept_(kept),
      out_(out),
      pieces_(x.size(0)),
      hidden_product_(product_weight(weights.hidden_weight, x)),
      out_product_(product_weight(weights.out_weight, x)) {
  const std::int64_t hidden_width = weights.hidden_weight.size(0);
  const bool keeps_hidden = kept.hidden.defined(), keeps_active = kept.active.defined();
  norm_buffer_ = pieces_.buffer(present(weights.norm_weight) && !kept.norm.defined(), x.size(1), x);
  // Where the hidden layer is not kept, its activation takes its place, or a GELU that is kept
  // gives it one.
  hidden_buffer_ =
      pieces_.buffer(!keeps_hidden && (call.activation.gated || !keeps_active), hidden_width, x);
  active_buffer_ =
      pieces_.buffer(keeps_hidden && !keeps_active, call.activation.width(hidden_width), x);
}

void ForwardPass::run() const {
  pieces_.for_each([&](const Piece& piece) { run(piece); });
}

void ForwardPass::run(const Piece& piece) const {
  const at::Tensor x = piece.of(x_), normed = normalize(piece, x);
  const at::Tensor hidden = hidden_place(piece), active = active_place(piece, hidden);
  linear(normed, hidden_product_, hidden, 0.0);
  call_.hidden_adapters.add(normed, hidden, piece.begin);
  if (kept_.half_hidden.defined()) convert_out(hidden, piece.of(kept_.half_hidden));
  call_.activation.forward(hidden, weights_.hidden_bias, active);
  add_output(piece, active, call_.residual == Residual::kNorm ? normed : x);
}

at::Tensor ForwardPass::normalize(const Piece& piece, const at::Tensor& x) const {
  if (!present(weights_.norm_weight)) return x;
  const at::Tensor normed = piece.of_kept_or_in(kept_.norm, norm_buffer_);
  layer_norm_forward(x, weights_.norm_weight, weights_.norm_bias, call_.norm_eps, normed,
                     piece.of(kept_.mean), piece.of(kept_.rstd));
  return normed;
}

at::Tensor ForwardPass::hidden_place(const Piece& piece) const {
  if (!kept_.hidden.defined() && !hidden_buffer_.defined()) return piece.of(kept_.active);
  return piece.of_kept_or_in(kept_.hidden, hidden_buffer_);
}

at::Tensor ForwardPass::active_place(const Piece& piece, const at::Tensor& hidden) const {
  if (!kept_.active.defined() && !active_buffer_.defined()) return call_.activation.within(hidden);
  return piece.of_kept_or_in(kept_.active, active_buffer_);
}

void ForwardPass::add_output(const Piece& piece, const at::Tensor& active,
                             const at::Tensor& residual) const {
  const at::Tensor out = piece.of(out_);
  const at::Tensor& bias = weights_.out_bias;
  const bool has_residual = call_.residual != Residual::kNone;
  if (has_residual && call_.dropout_p == 0.0 && out.scalar_type() == at::kFloat) {
    add_bias(residual, bias, out);
    linear(active, out_product_, out, 1.0);
    call_.out_adapters.add(active, out, piece.begin);
    return;
  }
  linear(active, out_product_, out, 0.0);
  call_.out_adapters.add(active, out, piece.begin);
  // Sums that are rounded are made in one pass: residual + bias alone would be rounded as well.
  if (call_.dropout_p != 0.0 || has_residual) {
    const kernels::Dropout dropout =
        dropout_from_seed(call_.dropout_p, static_cast<std::uint64_t>(call_.seed));
    dropout_add(dropout, out, bias, has_residual ? residual : at::Tensor(), out, piece.begin);
  } else if (present(bias)) {
    add_bias(out, bias, out);
  }
}

Adapters::Adapters(AutogradContext* ctx, const variable_list& saved)
    : hidden(ctx->saved_data, "hidden_adapters", at::TensorList(saved).slice(kAdapters)),
      out(ctx->saved_data, "out_adapters",
          at::TensorList(saved).slice(kAdapters + hidden.num_tensors())) {
  for (std::size_t i = 0; i < hidden.num_tensors() + out.num_tensors(); ++i) {
    const ParameterGrad gradient(saved[kAdapters + i], ctx->needs_input_grad(kNumWeights + i));
    (i < hidden.num_tensors() ? hidden_gradients : out_gradients).push_back(gradient);
    returned.push_back(gradient.returned);
  }
}

LayerGrads::LayerGrads(AutogradContext* ctx, const variable_list& saved)
    : hidden_weight(saved[kHiddenWeight], ctx->needs_input_grad(kHiddenWeight)),
      hidden_bias(saved[kHiddenBias], ctx->needs_input_grad(kHiddenBias)),
      out_weight(saved[kOutWeight], ctx->needs_input_grad(kOutWeight)) {}

BackwardPass::BackwardPass(AutogradContext* ctx, const variable_list& saved,
                           const Adapters& adapters, const LayerGrads& grads, const at::Tensor& x,
                           const at::Tensor& d, const at::Tensor& dx)
    : saved_(saved),
      saved_data_(ctx->saved_data),
      activation_{ctx->saved_data["gated"].toBool(),
                  static_cast<GeluKind>(ctx->saved_data["gelu"].toInt())},
      adapters_(adapters),
      grads_(grads),
      x_(x),
      d_(d),
      dx_(dx),
      pieces_(x.size(0)) {
  const std::int64_t hidden_width = saved[kHiddenWeight].size(0);
  const bool keeps_hidden = saved[kHidden].defined(), keeps_active = saved[kActivation].defined();
  dhidden_buffer_ = pieces_.buffer(true, hidden_width, d);
  hidden_product_ = product_weight(saved[kHiddenWeight], d);
  out_product_ = product_weight(saved[kOutWeight], d);
  half_hidden_ = take_out(ctx->saved_data, "hidden");
  reads_norm_ =
      present(saved[kNormWeight]) && (grads.hidden_weight.wanted() || !adapters.hidden.empty() ||
                                      (!keeps_hidden && !half_hidden_.defined()));
  reads_active_ = grads.out_weight.wanted() || !adapters.out.empty();
  norm_buffer_ = pieces_.buffer(reads_norm_ && !saved[kNorm].defined(), x.size(1), d);
  hidden_buffer_ = pieces_.buffer(!keeps_hidden, hidden_width, d);
  // Where the hidden layer is in a buffer of ours, its activation takes its place.
  active_buffer_ = pieces_.buffer(keeps_hidden && !keeps_active && reads_active_,
                                  activation_.width(hidden_width), d);
}

void BackwardPass::run() const {
  pieces_.for_each([&](const Piece& piece) { run(piece); });
}

void BackwardPass::run(const Piece& piece) const {
  const at::Tensor d = piece.of(d_), dhidden = piece.in(dhidden_buffer_);
  const at::Tensor normed = norm_again(piece), hidden = hidden_again(piece, normed);
  const at::Tensor active = active_place(piece, hidden);
  activation_grad(piece, d, hidden, active, dhidden);
  weight_grads(piece, d, active, dhidden, normed);
  if (dx_.defined()) input_grad(piece, dhidden);
}

at::Tensor BackwardPass::norm_again(const Piece& piece) const {
  const at::Tensor x = piece.of(x_);
  if (!reads_norm_) return x;
  if (saved_[kNorm].defined()) return piece.of(saved_[kNorm]);
  const at::Tensor normed = piece.in(norm_buffer_);
  layer_norm_apply(x, saved_[kNormWeight], saved_[kNormBias], piece.of(saved_[kMean]),
                   piece.of(saved_[kRstd]), normed);
  return normed;
}

at::Tensor BackwardPass::hidden_again(const Piece& piece, const at::Tensor& normed) const {
  if (saved_[kHidden].defined()) return piece.of(saved_[kHidden]);
  const at::Tensor hidden = piece.in(hidden_buffer_);
  if (half_hidden_.defined()) {
    convert_out(piece.of(half_hidden_), hidden);
  } else {
    linear(normed, hidden_product_, hidden, 0.0);
    adapters_.hidden.add(normed, hidden, piece.begin);
    round_as_kept(saved_data_, hidden, x_.size(0) * hidden.size(1));
  }
  return hidden;
}

at::Tensor BackwardPass::active_place(const Piece& piece, const at::Tensor& hidden) const {
  if (!reads_active_) return {};
  if (!saved_[kActivation].defined() && !active_buffer_.defined())
    return activation_.within(hidden);
  return piece.of_kept_or_in(saved_[kActivation], active_buffer_);
}

void BackwardPass::activation_grad(const Piece& piece, const at::Tensor& d,
                                   const at::Tensor& hidden, const at::Tensor& active,
                                   const at::Tensor& dhidden) const {
  const at::Tensor dactive = activation_.within(dhidden);
  linear_grad_input(d, out_product_, dactive);
  adapters_.out.add_input_gradient(d, dactive, piece.begin);
  activation_.backward(
      hidden, saved_[kHiddenBias], dhidden, saved_[kActivation].defined() ? at::Tensor() : active,
      grads_.hidden_bias.gradient, piece.begin != 0 || grads_.hidden_bias.accumulate);
}

void BackwardPass::weight_grads(const Piece& piece, const at::Tensor& d, const at::Tensor& active,
                                const at::Tensor& dhidden, const at::Tensor& normed) const {
  adapters_.out.add_gradients(active, d, adapters_.out_gradients, piece.begin);
  adapters_.hidden.add_gradients(normed, dhidden, adapters_.hidden_gradients, piece.begin);
  const auto add = [&](const ParameterGrad& grad, const at::Tensor& dy, const at::Tensor& given) {
    if (grad.wanted())
      linear_grad_weight(dy, given, grad.gradient, piece.begin == 0 ? grad.beta() : 1.0);
  };
  add(grads_.out_weight, d, active);
  add(grads_.hidden_weight, dhidden, normed);
}

void BackwardPass::input_grad(const Piece& piece, const at::Tensor& dhidden) const {
  const at::Tensor dx = piece.of(dx_);
  linear_grad_input(dhidden, hidden_product_, dx);
  adapters_.hidden.add_input_gradient(dhidden, dx, piece.begin);
}

}  // namespace headroom::ops::mlp
