#pragma once

// Kernels on tensors: what kernels.h does to rows, done to whole tensors by all threads. Tensors
// are contiguous; activations and their gradients are all floats or all bf16, parameters and their
// gradients are floats. An undefined or empty tensor leaves out an optional part. On the meta
// device nothing is computed, so that a function built from these allocates the same sizes there as
// on the CPU. Results do not depend on the number of threads.

#include <headroom/ops/transformer.h>
#include "ops/kernels.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <string>

namespace headroom::ops {

/// True when our kernels take a tensor like x on the CPU or the meta device: floats, and under
/// autocast bf16.
bool has_kernels(const at::Tensor& x);
/// True when autocast is on for x's device; for the meta device, when it is for the CPU.
bool is_autocast(const at::Tensor& x);
/// x as a function of ours computes with it: under autocast on the CPU floats become bf16, and
/// autograd turns the gradient back.
at::Tensor in_compute_type(const at::Tensor& x);
/// `weight` as a product with activations like x reads it: itself, or where they are bf16 its copy
/// in bf16.
at::Tensor product_weight(const at::Tensor& weight, const at::Tensor& x);
/// True when autograd will ask for a gradient of one of these.
bool wants_grad(at::TensorList tensors);
/// An undefined tensor as an empty one, which autograd functions can take; and whether a tensor is
/// there.
at::Tensor or_empty(const at::Tensor& tensor, const at::Tensor& like);
inline bool present(const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }
/// An optional part as LibTorch's operators take it.
using MaybeTensor = c10::optional<at::Tensor>;
inline MaybeTensor maybe(const at::Tensor& tensor) {
  return present(tensor) ? MaybeTensor(tensor) : MaybeTensor();
}

/// Keeps a small tensor in `saved_data`, where it stays exact: what autograd saves may be rounded,
/// and an error in a row's mean, deviation or log-sum would be one in every element of the row. An
/// undefined tensor is undefined when taken.
using SavedData = ska::flat_hash_map<std::string, c10::IValue>;
void keep_exact(SavedData& saved_data, const char* name, const at::Tensor& tensor);
at::Tensor take_exact(const SavedData& saved_data, const char* name);
/// What keep_exact kept under `name`, which is then kept no longer; undefined when there is
/// nothing.
at::Tensor take_out(SavedData& saved_data, const char* name);
/// True when a tensor of `num_elements` floats is kept as `type`. An op then keeps it so itself,
/// and turns it back piece by piece or into memory that it reuses, where autograd would turn back
/// the whole.
bool keeps_half(std::optional<at::ScalarType> type, std::int64_t num_elements);
/// Notes kept_type() for backward.
void keep_type(SavedData& saved_data, std::optional<at::ScalarType> type);
/// Rounds x, all or a part of a recomputed tensor of `num_elements`, as that would have been
/// rounded if it had been kept.
void round_as_kept(const SavedData& saved_data, const at::Tensor& x, std::int64_t num_elements);

/// Uninitialised memory on the device of `like`: of its type, or floats.
at::Tensor make_values(at::IntArrayRef sizes, const at::Tensor& like);
at::Tensor make_floats(at::IntArrayRef sizes, const at::Tensor& like);

/// Draws the seed of one call from LibTorch's default CPU generator. p = 0 draws nothing. Throws
/// ConfigError unless 0 <= p <= 1.
kernels::Dropout draw_dropout(double p);
/// The same decisions from a kept seed.
kernels::Dropout dropout_from_seed(double p, std::uint64_t seed);

/// Where a backward writes the gradient of a parameter: straight into .grad where that is allowed
/// (see direct_gradient.h), else into a new tensor that is returned to autograd.
struct ParameterGrad {
  /// `needed` is false when autograd does not ask for it.
  ParameterGrad(const at::Tensor& parameter, bool needed);
  bool wanted() const { return gradient.defined(); }
  double beta() const { return accumulate ? 1.0 : 0.0; }

  at::Tensor gradient;      ///< undefined: not wanted
  at::Tensor returned;      ///< what backward returns
  bool accumulate = false;  ///< add to what is there, instead of writing
};

// Matrices: x (n, in), w (out, in), y (n, out). Where x is bf16, w is product_weight(), y, dy and
// dx are bf16, or y floats, and dw is floats.
/// y = beta * y + x w^T
void linear(const at::Tensor& x, const at::Tensor& w, at::Tensor y, double beta);
/// dx = dy w
void linear_grad_input(const at::Tensor& dy, const at::Tensor& w, at::Tensor dx);
/// dw = beta * dw + dy^T x
void linear_grad_weight(const at::Tensor& dy, const at::Tensor& x, at::Tensor dw, double beta);

// Rows: x, y, dy, dx (n, width). Without `mean` the norm is an RMS norm.
void layer_norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        double eps, at::Tensor y, at::Tensor mean, at::Tensor rstd);
void layer_norm_apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& mean, const at::Tensor& rstd, at::Tensor y);
/// dx = residual + gradient; dx may be dy.
void layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                         const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& residual, at::Tensor dx, const ParameterGrad& dweight,
                         const ParameterGrad& dbias);
void bias_gelu_forward(GeluKind kind, const at::Tensor& h, const at::Tensor& bias, at::Tensor y);
/// d becomes d * gelu'(h + bias); y (optional; may be h) becomes gelu(h + bias); dbias (optional)
/// is written or added to.
void bias_gelu_backward(GeluKind kind, const at::Tensor& h, const at::Tensor& bias, at::Tensor d,
                        at::Tensor y, at::Tensor dbias, bool accumulate);
/// h (n, 2 width), rows of gate and up; y (n, width) becomes silu(gate) * up. y may be the first
/// half of h.
void swiglu_forward(const at::Tensor& h, const at::Tensor& bias, at::Tensor y);
/// The first half of d (n, 2 width), the gradient of y, and its second become the gradient of h; y
/// (optional; as in forward) is computed again; dbias (2 width; optional) is written or added to.
void swiglu_backward(const at::Tensor& h, const at::Tensor& bias, at::Tensor d, at::Tensor y,
                     at::Tensor dbias, bool accumulate);
void add_bias(const at::Tensor& x, const at::Tensor& bias, at::Tensor y);
void dropout_add(const kernels::Dropout& dropout, const at::Tensor& x, const at::Tensor& bias,
                 const at::Tensor& residual, at::Tensor y, std::int64_t first_row = 0);
/// sums = (accumulate ? sums : 0) + the sum of the rows, which may be any distance apart.
void column_sums(const at::Tensor& x, at::Tensor sums, bool accumulate);

// Attention.
struct AttentionParams {
  std::int64_t num_heads = 1, num_kv_heads = 1;
  bool causal = false;
  double dropout_p = 0.0;
  kernels::Dropout dropout;
  std::optional<RotaryOptions> rotary;
  at::Tensor key_mask;  ///< (B, T), contiguous; optional: bool, or int32 the first keys of queries

  /// Draws the seed of dropout.
  AttentionParams(std::int64_t num_heads, const AttentionOptions& options, const at::Tensor& like);
  /// What keep() kept, with the mask that autograd kept.
  AttentionParams(const SavedData& saved_data, const at::Tensor& key_mask);
  void keep(SavedData& saved_data) const;
  std::int64_t head_size(std::int64_t qkv_width) const {
    return qkv_width / (num_heads + 2 * num_kv_heads);
  }
};
/// qkv (B, T, (H + 2 K) D) without its bias -> y (B, T, H D), softmax (B, H, 2, T) as kernels.h has
/// it
void attention_forward(const AttentionParams& params, const at::Tensor& qkv, const at::Tensor& bias,
                       at::Tensor y, at::Tensor softmax);
/// dqkv, like qkv, is written; it may be qkv, since every head is read before it is written.
void attention_backward(const AttentionParams& params, const at::Tensor& qkv,
                        const at::Tensor& bias, const at::Tensor& y, const at::Tensor& softmax,
                        const at::Tensor& dy, at::Tensor dqkv);

}  // namespace headroom::ops
