#pragma once

// The MLP's forward and backward between its tensors: norm, hidden layer, activation, output layer.

#include <headroom/ops/transformer.h>
#include "ops/low_rank.h"
#include "ops/passes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace headroom::ops::mlp {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the output of the MLP is added to.
enum class Residual : int { kNone, kInput, kNorm };

/// What is between the hidden layer and the output: a GELU, or the product of gate and up, which is
/// half as wide as the hidden layer.
struct Activation {
  bool gated = false;
  GeluKind gelu = GeluKind::kTanh;

  std::int64_t width(std::int64_t hidden_width) const {
    return gated ? hidden_width / 2 : hidden_width;
  }
  /// The place in a row of the hidden layer, or of its gradient, that the activation, or its
  /// gradient, can take.
  at::Tensor within(const at::Tensor& hidden) const;
  /// y, which may be within(h), becomes the activation.
  void forward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& y) const;
  /// within(d) is given the gradient of the activation; d becomes that of the hidden layer.
  void backward(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& d,
                const at::Tensor& y, const at::Tensor& dbias, bool accumulate) const;
};

struct Call {
  Activation activation;
  NormKind norm = NormKind::kLayer;
  double dropout_p = 0.0, norm_eps = 0.0;
  std::int64_t seed = 0;
  Residual residual = Residual::kNone;
  bool wants_grad = false, keep_norm = true, keep_hidden = true, keep_activation = true;
  std::optional<at::ScalarType> kept_type;
  LowRankCall hidden_adapters, out_adapters;
};

/// The first seven are the tensors that autograd knows, in its order; after them it knows those of
/// the adapters, which are saved last.
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

/// Rows [begin, begin + count) of all.
struct Piece {
  std::int64_t begin = 0, count = 0;

  /// The rows of a tensor that has all; undefined stays undefined.
  at::Tensor of(const at::Tensor& tensor) const {
    return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
  }
  /// The rows of a buffer that has those of one piece.
  at::Tensor in(const at::Tensor& buffer) const { return buffer.narrow(0, 0, count); }
  /// The rows of what is kept, or of the buffer that stands in for it.
  at::Tensor of_kept_or_in(const at::Tensor& kept, const at::Tensor& buffer) const {
    return kept.defined() ? of(kept) : in(buffer);
  }
};

/// The wide layer goes through in pieces of about a thousand rows: what is not kept exists for one
/// piece only, and matrix products of that size lose nothing. The pieces depend on the number of
/// rows alone, so that all ways of keeping give the same bits.
class Pieces {
 public:
  explicit Pieces(std::int64_t num_rows);
  template <typename Run>
  void for_each(Run run) const {
    for (std::int64_t begin = 0; begin < num_rows_; begin += most_rows_)
      run(Piece{begin, std::min(most_rows_, num_rows_ - begin)});
  }
  /// Room for the values of any one piece; undefined where it is not needed.
  at::Tensor buffer(bool needed, std::int64_t width, const at::Tensor& like) const;

 private:
  std::int64_t num_rows_, most_rows_;
};

/// What forward leaves for backward, of all rows. What is undefined is made again.
struct Kept {
  /// Allocates; x (n, C).
  Kept(const at::Tensor& x, const MlpWeights& weights, const Call& call);

  at::Tensor mean, rstd;  ///< forward needs them in any case
  at::Tensor norm;
  at::Tensor hidden, half_hidden;  ///< before the bias; one of them, or none
  at::Tensor active;
};

/// Computes `out` from x, both (n, C), and fills what is kept. Refers to what it is given; its
/// buffers live as long as it.
class ForwardPass {
 public:
  ForwardPass(const at::Tensor& x, const MlpWeights& weights, const Call& call, const Kept& kept,
              const at::Tensor& out);
  void run() const;

 private:
  void run(const Piece& piece) const;
  at::Tensor normalize(const Piece& piece, const at::Tensor& x) const;
  at::Tensor hidden_place(const Piece& piece) const;
  at::Tensor active_place(const Piece& piece, const at::Tensor& hidden) const;
  // out = residual, where there is one, + dropout(active out_weight^T + bias)
  void add_output(const Piece& piece, const at::Tensor& active, const at::Tensor& residual) const;

  const at::Tensor& x_;
  const MlpWeights& weights_;
  const Call& call_;
  const Kept& kept_;
  const at::Tensor& out_;
  Pieces pieces_;
  at::Tensor hidden_product_, out_product_;                 // the weights as the products read them
  at::Tensor norm_buffer_, hidden_buffer_, active_buffer_;  // undefined: needed for no piece
};

/// The adapters of both layers again, and where their gradients go.
struct Adapters {
  Adapters(AutogradContext* ctx, const variable_list& saved);

  LowRankCall hidden, out;
  std::vector<ParameterGrad> hidden_gradients, out_gradients;
  variable_list returned;
};

/// Where the gradients of both layers go, but for the output's bias.
struct LayerGrads {
  LayerGrads(AutogradContext* ctx, const variable_list& saved);

  ParameterGrad hidden_weight, hidden_bias, out_weight;
};

/// Writes the gradients of both layers and of their adapters, and into `dx`, where it is defined,
/// that of what the hidden layer is given. `d` is the gradient of what the output layer returns; x,
/// d and dx are (n, C). Takes the half precision hidden layer out of what `ctx` saved. Refers to
/// what it is given; its buffers live as long as it.
class BackwardPass {
 public:
  BackwardPass(AutogradContext* ctx, const variable_list& saved, const Adapters& adapters,
               const LayerGrads& grads, const at::Tensor& x, const at::Tensor& d,
               const at::Tensor& dx);
  void run() const;

 private:
  void run(const Piece& piece) const;
  // What the hidden layer was given, where it is read.
  at::Tensor norm_again(const Piece& piece) const;
  at::Tensor hidden_again(const Piece& piece, const at::Tensor& normed) const;
  // Where the activation is or will be; undefined: nobody reads it.
  at::Tensor active_place(const Piece& piece, const at::Tensor& hidden) const;
  // Writes dhidden and the gradient of the hidden bias, and the activation where it was not kept.
  void activation_grad(const Piece& piece, const at::Tensor& d, const at::Tensor& hidden,
                       const at::Tensor& active, const at::Tensor& dhidden) const;
  void weight_grads(const Piece& piece, const at::Tensor& d, const at::Tensor& active,
                    const at::Tensor& dhidden, const at::Tensor& normed) const;
  void input_grad(const Piece& piece, const at::Tensor& dhidden) const;

  const variable_list& saved_;
  const SavedData& saved_data_;
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

}  // namespace headroom::ops::mlp
