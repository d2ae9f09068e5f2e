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

// Rows [begin, begin + count) of all.
struct Piece {
  std::int64_t begin = 0, count = 0;

  // The rows of a tensor that has all; undefined stays undefined.
  at::Tensor of(const at::Tensor& tensor) const {
    return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
  }
  // The rows of a buffer that has those of one piece.
  at::Tensor in(const at::Tensor& buffer) const { return buffer.narrow(0, 0, count); }
  // The rows of what is kept, or of the buffer that stands in for it.
  at::Tensor of_kept_or_in(const at::Tensor& kept, const at::Tensor& buffer) const {
    return kept.defined() ? of(kept) : in(buffer);
  }
};

// The wide layer goes through in pieces of about a thousand rows: what is not kept exists for one
// piece only, and matrix products of that size lose nothing. The pieces depend on the number of
// rows alone, so that all ways of keeping give the same bits.
class Pieces {
 public:
  explicit Pieces(std::int64_t num_rows) : num_rows_(num_rows) {
    const std::int64_t num_pieces = std::max<std::int64_t>(1, num_rows / 1024);
    most_rows_ = std::max<std::int64_t>(1, (num_rows + num_pieces - 1) / num_pieces);
  }
  template <typename Run>
  void for_each(Run run) const {
    for (std::int64_t begin = 0; begin < num_rows_; begin += most_rows_)
      run(Piece{begin, std::min(most_rows_, num_rows_ - begin)});
  }
  // Room for the values of any one piece; undefined where it is not needed.
  at::Tensor buffer(bool needed, std::int64_t width, const at::Tensor& like) const {
    return needed ? ops::make_values({std::min(num_rows_, most_rows_), width}, like) : at::Tensor();
  }

 private:
  std::int64_t num_rows_, most_rows_ = 1;
};

// What forward leaves for backward, of all rows. What is undefined is made again.
struct Kept {
  Kept(const at::Tensor& x, const MlpWeights& weights, const Call& call) {
    const std::int64_t num_rows = x.size(0), hidden_width = weights.hidden_weight.size(0);
    const bool has_norm = ops::present(weights.norm_weight);
    const auto values = [&](bool keep, std::int64_t width) {
      return keep && call.wants_grad ? ops::make_values({num_rows, width}, x) : at::Tensor();
    };
    const auto floats = [&](bool needed) {
      return needed ? ops::make_floats({num_rows, 1}, x) : at::Tensor();
    };
    mean = floats(has_norm && call.norm == NormKind::kLayer);
    rstd = floats(has_norm);
    norm = values(has_norm && call.keep_norm, x.size(1));
    const bool halves = call.wants_grad && call.keep_hidden &&
                        ops::keeps_half(call.kept_type, num_rows * hidden_width);
    hidden = values(call.keep_hidden && !halves, hidden_width);
    if (halves) {
      half_hidden = at::empty({num_rows, hidden_width},
                              x.options().dtype(*call.kept_type).requires_grad(false));
    }
    active = values(call.keep_activation, call.activation.width(hidden_width));
  }

  at::Tensor mean, rstd;  // forward needs them in any case
  at::Tensor norm;
  at::Tensor hidden, half_hidden;  // before the bias; one of them, or none
  at::Tensor active;
};

// Computes `out` from x, both of all rows, and fills what is kept. Its buffers live as long as it.
class ForwardPass {
 public:
  ForwardPass(const at::Tensor& x, const MlpWeights& weights, const Call& call, const Kept& kept,
              const at::Tensor& out)
      : x_(x),
        weights_(weights),
        call_(call),
        kept_(kept),
        out_(out),
        pieces_(x.size(0)),
        hidden_product_(ops::product_weight(weights.hidden_weight, x)),
        out_product_(ops::product_weight(weights.out_weight, x)) {
    const std::int64_t hidden_width = weights.hidden_weight.size(0);
    const bool keeps_hidden = kept.hidden.defined(), keeps_active = kept.active.defined();
    norm_buffer_ =
        pieces_.buffer(ops::present(weights.norm_weight) && !kept.norm.defined(), x.size(1), x);
    // Where the hidden layer is not kept, its activation takes its place, or a GELU that is kept
    // gives it one.
    hidden_buffer_ =
        pieces_.buffer(!keeps_hidden && (call.activation.gated || !keeps_active), hidden_width, x);
    active_buffer_ =
        pieces_.buffer(keeps_hidden && !keeps_active, call.activation.width(hidden_width), x);
  }

  void run() const {
    pieces_.for_each([&](const Piece& piece) { run(piece); });
  }

 private:
  void run(const Piece& piece) const {
    const at::Tensor x = piece.of(x_), normed = normalize(piece, x);
    const at::Tensor hidden = hidden_place(piece), active = active_place(piece, hidden);
    ops::linear(normed, hidden_product_, hidden, 0.0);
    call_.hidden_adapters.add(normed, hidden, piece.begin);
    if (kept_.half_hidden.defined()) convert_out(hidden, piece.of(kept_.half_hidden));
    call_.activation.forward(hidden, weights_.hidden_bias, active);
    add_output(piece, active, call_.residual == Residual::kNorm ? normed : x);
  }

  at::Tensor normalize(const Piece& piece, const at::Tensor& x) const {
    if (!ops::present(weights_.norm_weight)) return x;
    const at::Tensor normed = piece.of_kept_or_in(kept_.norm, norm_buffer_);
    ops::layer_norm_forward(x, weights_.norm_weight, weights_.norm_bias, call_.norm_eps, normed,
                            piece.of(kept_.mean), piece.of(kept_.rstd));
    return normed;
  }

  at::Tensor hidden_place(const Piece& piece) const {
    if (!kept_.hidden.defined() && !hidden_buffer_.defined()) return piece.of(kept_.active);
    return piece.of_kept_or_in(kept_.hidden, hidden_buffer_);
  }

  at::Tensor active_place(const Piece& piece, const at::Tensor& hidden) const {
    if (!kept_.active.defined() && !active_buffer_.defined())
      return call_.activation.within(hidden);
    return piece.of_kept_or_in(kept_.active, active_buffer_);
  }

  // out = residual, where there is one, + dropout(active out_weight^T + bias)
  void add_output(const Piece& piece, const at::Tensor& active, const at::Tensor& residual) const {
    const at::Tensor out = piece.of(out_);
    const at::Tensor& bias = weights_.out_bias;
    const bool has_residual = call_.residual != Residual::kNone;
    if (has_residual && call_.dropout_p == 0.0 && out.scalar_type() == at::kFloat) {
      ops::add_bias(residual, bias, out);
      ops::linear(active, out_product_, out, 1.0);
      call_.out_adapters.add(active, out, piece.begin);
      return;
    }
    ops::linear(active, out_product_, out, 0.0);
    call_.out_adapters.add(active, out, piece.begin);
    // Sums that are rounded are made in one pass: residual + bias alone would be rounded as well.
    if (call_.dropout_p != 0.0 || has_residual) {
      const kernels::Dropout dropout =
          ops::dropout_from_seed(call_.dropout_p, static_cast<std::uint64_t>(call_.seed));
      ops::dropout_add(dropout, out, bias, has_residual ? residual : at::Tensor(), out,
                       piece.begin);
    } else if (ops::present(bias)) {
      ops::add_bias(out, bias, out);
    }
  }

  const at::Tensor& x_;
  const MlpWeights& weights_;
  const Call& call_;
  const Kept& kept_;
  const at::Tensor& out_;
  Pieces pieces_;
  at::Tensor hidden_product_, out_product_;                 // the weights as the products read them
  at::Tensor norm_buffer_, hidden_buffer_, active_buffer_;  // undefined: needed for no piece
};

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

// Where the gradients of both layers go, but for the output's bias.
struct LayerGrads {
  LayerGrads(AutogradContext* ctx, const variable_list& saved)
      : hidden_weight(saved[kHiddenWeight], ctx->needs_input_grad(kHiddenWeight)),
        hidden_bias(saved[kHiddenBias], ctx->needs_input_grad(kHiddenBias)),
        out_weight(saved[kOutWeight], ctx->needs_input_grad(kOutWeight)) {}
  ops::ParameterGrad hidden_weight, hidden_bias, out_weight;
};

// Writes the gradients of both layers and of their adapters, and into `dx`, where it is defined,
// that of what the hidden layer is given. `d` is the gradient of what the output layer returns; all
// have all rows. Takes the half precision hidden layer out of what `ctx` saved. Its buffers live as
// long as it.
class BackwardPass {
 public:
  BackwardPass(AutogradContext* ctx, const variable_list& saved, const Adapters& adapters,
               const LayerGrads& grads, const at::Tensor& x, const at::Tensor& d,
               const at::Tensor& dx)
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
    hidden_product_ = ops::product_weight(saved[kHiddenWeight], d);
    out_product_ = ops::product_weight(saved[kOutWeight], d);
    half_hidden_ = ops::take_out(ctx->saved_data, "hidden");
    reads_norm_ = ops::present(saved[kNormWeight]) &&
                  (grads.hidden_weight.wanted() || !adapters.hidden.empty() ||
                   (!keeps_hidden && !half_hidden_.defined()));
    reads_active_ = grads.out_weight.wanted() || !adapters.out.empty();
    norm_buffer_ = pieces_.buffer(reads_norm_ && !saved[kNorm].defined(), x.size(1), d);
    hidden_buffer_ = pieces_.buffer(!keeps_hidden, hidden_width, d);
    // Where the hidden layer is in a buffer of ours, its activation takes its place.
    active_buffer_ = pieces_.buffer(keeps_hidden && !keeps_active && reads_active_,
                                    activation_.width(hidden_width), d);
  }

  void run() const {
    pieces_.for_each([&](const Piece& piece) { run(piece); });
  }

 private:
  void run(const Piece& piece) const {
    const at::Tensor d = piece.of(d_), dhidden = piece.in(dhidden_buffer_);
    const at::Tensor normed = norm_again(piece), hidden = hidden_again(piece, normed);
    const at::Tensor active = active_place(piece, hidden);
    activation_grad(piece, d, hidden, active, dhidden);
    weight_grads(piece, d, active, dhidden, normed);
    if (dx_.defined()) input_grad(piece, dhidden);
  }

  // What the hidden layer was given, where it is read.
  at::Tensor norm_again(const Piece& piece) const {
    const at::Tensor x = piece.of(x_);
    if (!reads_norm_) return x;
    if (saved_[kNorm].defined()) return piece.of(saved_[kNorm]);
    const at::Tensor normed = piece.in(norm_buffer_);
    ops::layer_norm_apply(x, saved_[kNormWeight], saved_[kNormBias], piece.of(saved_[kMean]),
                          piece.of(saved_[kRstd]), normed);
    return normed;
  }

  at::Tensor hidden_again(const Piece& piece, const at::Tensor& normed) const {
    if (saved_[kHidden].defined()) return piece.of(saved_[kHidden]);
    const at::Tensor hidden = piece.in(hidden_buffer_);
    if (half_hidden_.defined()) {
      convert_out(piece.of(half_hidden_), hidden);
    } else {
      ops::linear(normed, hidden_product_, hidden, 0.0);
      adapters_.hidden.add(normed, hidden, piece.begin);
      ops::round_as_kept(saved_data_, hidden, x_.size(0) * hidden.size(1));
    }
    return hidden;
  }

  // Where the activation is or will be; undefined: nobody reads it.
  at::Tensor active_place(const Piece& piece, const at::Tensor& hidden) const {
    if (!reads_active_) return {};
    if (!saved_[kActivation].defined() && !active_buffer_.defined())
      return activation_.within(hidden);
    return piece.of_kept_or_in(saved_[kActivation], active_buffer_);
  }

  // Writes dhidden and the gradient of the hidden bias, and the activation where it was not kept.
  void activation_grad(const Piece& piece, const at::Tensor& d, const at::Tensor& hidden,
                       const at::Tensor& active, const at::Tensor& dhidden) const {
    const at::Tensor dactive = activation_.within(dhidden);
    ops::linear_grad_input(d, out_product_, dactive);
    adapters_.out.add_input_gradient(d, dactive, piece.begin);
    activation_.backward(
        hidden, saved_[kHiddenBias], dhidden, saved_[kActivation].defined() ? at::Tensor() : active,
        grads_.hidden_bias.gradient, piece.begin != 0 || grads_.hidden_bias.accumulate);
  }

  void weight_grads(const Piece& piece, const at::Tensor& d, const at::Tensor& active,
                    const at::Tensor& dhidden, const at::Tensor& normed) const {
    adapters_.out.add_gradients(active, d, adapters_.out_gradients, piece.begin);
    adapters_.hidden.add_gradients(normed, dhidden, adapters_.hidden_gradients, piece.begin);
    const auto add = [&](const ops::ParameterGrad& grad, const at::Tensor& dy,
                         const at::Tensor& given) {
      if (grad.wanted())
        ops::linear_grad_weight(dy, given, grad.gradient, piece.begin == 0 ? grad.beta() : 1.0);
    };
    add(grads_.out_weight, d, active);
    add(grads_.hidden_weight, dhidden, normed);
  }

  void input_grad(const Piece& piece, const at::Tensor& dhidden) const {
    const at::Tensor dx = piece.of(dx_);
    ops::linear_grad_input(dhidden, hidden_product_, dx);
    adapters_.hidden.add_input_gradient(dhidden, dx, piece.begin);
  }

  const variable_list& saved_;
  const ops::SavedData& saved_data_;
  Activation activation_;
  const Adapters& adapters_;
  const LayerGrads& grads_;
  const at::Tensor &x_, &d_, &dx_;
  Pieces pieces_;
  at::Tensor dhidden_buffer_;
  at::Tensor hidden_product_, out_product_;  // the weights as the products read them
  at::Tensor half_hidden_;                   // undefined: not kept so
  bool reads_norm_ = false, reads_active_ = false;
  at::Tensor norm_buffer_, hidden_buffer_, active_buffer_;  // undefined: needed for no piece
};

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
