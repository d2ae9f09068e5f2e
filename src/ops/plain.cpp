#include "ops/plain.h"

#include "core/torch_compat.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace headroom::ops {
namespace {

c10::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::optional<at::Tensor>();
}

}  // namespace

at::Tensor plain_attention(const at::Tensor& qkv, std::int64_t num_heads, bool causal,
                           const at::Tensor& key_mask, double dropout_p) {
  const std::int64_t num_samples = qkv.size(0), length = qkv.size(1), channels = qkv.size(2) / 3,
                     head_size = channels / num_heads;
  const auto heads = [&](std::int64_t part) {  // (B, H, T, D)
    return qkv.slice(2, part * channels, (part + 1) * channels)
        .view({num_samples, length, num_heads, head_size})
        .transpose(1, 2);
  };
  const at::Tensor q = heads(0), k = heads(1), v = heads(2);
#ifdef HEADROOM_HAS_FUSED_ATTENTION
  if (!qkv.is_cpu() && !key_mask.defined()) {
    return at::scaled_dot_product_attention(q, k, v, {}, dropout_p, causal)
        .transpose(1, 2)
        .reshape({num_samples, length, channels});
  }
#endif
  at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) *
                      (1.0 / std::sqrt(static_cast<double>(head_size)));  // (B, H, T, T)
  at::Tensor hidden;
  if (causal)
    hidden = at::ones({length, length}, qkv.options().dtype(at::kBool).requires_grad(false))
                 .tril()
                 .logical_not();
  if (key_mask.defined()) {
    const at::Tensor masked = key_mask.logical_not().view({num_samples, 1, 1, length});
    hidden = hidden.defined() ? hidden.logical_or(masked) : masked;
  }
  at::Tensor weights;
  if (hidden.defined()) {
    // A row without any visible key would be 0/0: its scores are left alone, and its weights set to
    // 0 afterwards.
    const at::Tensor blind = hidden.all(-1, true);
    weights = at::softmax(scores.masked_fill(hidden.logical_and(blind.logical_not()),
                                             -std::numeric_limits<double>::infinity()),
                          -1)
                  .masked_fill(blind, 0.0);
  } else {
    weights = at::softmax(scores, -1);
  }
  if (dropout_p > 0.0) weights = at::dropout(weights, dropout_p, true);
  return at::matmul(weights, v).transpose(1, 2).reshape({num_samples, length, channels});
}

at::Tensor plain_layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            double eps) {
  return at::layer_norm(x, {x.size(-1)}, optional(weight), optional(bias), eps);
}

at::Tensor plain_gelu(const at::Tensor& x, GeluKind kind) {
  return at::gelu(x, kind == GeluKind::kTanh ? "tanh" : "none");
}

at::Tensor plain_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(x, weight, optional(bias));
}

at::Tensor plain_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                      const at::Tensor& targets,
                                      const CrossEntropyOptions& options) {
  const at::Tensor flat = targets.reshape({-1});
  at::Tensor losses = at::cross_entropy_loss(
      plain_linear(hidden.reshape({-1, hidden.size(-1)}), weight, options.bias), flat, {},
      at::Reduction::None, options.ignore_index);
  const at::Tensor counted = flat.ne(options.ignore_index).to(losses.scalar_type());
  const at::Tensor weights =
      options.item_weights.defined()
          ? options.item_weights.detach().reshape({-1}).to(losses.scalar_type()) * counted
          : counted;
  const at::Tensor sum = (losses * weights).sum();
  return options.reduction == CrossEntropyOptions::Reduction::kSum ? sum : sum / weights.sum();
}

}  // namespace headroom::ops
