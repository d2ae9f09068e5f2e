#include "ops/plain.h"

#include "core/torch_compat.h"
#include "ops/rotary.h"
#include "ops/sizes.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <utility>

namespace headroom::ops {
namespace {

c10::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::optional<at::Tensor>();
}

// Of each head of queries, (B, H, T, D).
struct Heads {
  at::Tensor q, k, v;
};

Heads split_heads(const at::Tensor& qkv, std::int64_t num_heads, const AttentionOptions& options) {
  const std::int64_t num_kv_heads = options.num_kv_heads.value_or(num_heads),
                     head_size = qkv.size(2) / (num_heads + 2 * num_kv_heads),
                     num_samples = qkv.size(0), length = qkv.size(1);
  const auto heads = [&](std::int64_t first, std::int64_t count) {  // (B, count, T, D)
    return qkv.slice(2, first * head_size, (first + count) * head_size)
        .view({num_samples, length, count, head_size})
        .transpose(1, 2);
  };
  at::Tensor q = heads(0, num_heads), k = heads(num_heads, num_kv_heads),
             v = heads(num_heads + num_kv_heads, num_kv_heads);
  if (options.rotary) {
    const at::Tensor table = rotary_table(*options.rotary, 0, length, head_size, qkv);
    q = rotate(q, table);
    k = rotate(k, table);
  }
  if (num_kv_heads != num_heads) {
    k = k.repeat_interleave(num_heads / num_kv_heads, 1);
    v = v.repeat_interleave(num_heads / num_kv_heads, 1);
  }
  return {std::move(q), std::move(k), std::move(v)};
}

// True for keys that a query must not see, as (B or 1, 1, T or 1, T) or (T, T); undefined when all
// may be seen. `key_mask` is that of key_mask_of().
at::Tensor hidden_keys(bool causal, const at::Tensor& key_mask, const at::Tensor& qkv) {
  const std::int64_t num_samples = qkv.size(0), length = qkv.size(1);
  at::Tensor hidden;
  if (causal)
    hidden = at::ones({length, length}, qkv.options().dtype(at::kBool).requires_grad(false))
                 .tril()
                 .logical_not();
  if (key_mask.defined()) {
    const bool are_first_keys = key_mask.scalar_type() == at::kInt;
    const at::Tensor masked =
        are_first_keys
            ? at::arange(length, key_mask.options()).lt(key_mask.view({num_samples, 1, length, 1}))
            : key_mask.logical_not().view({num_samples, 1, 1, length});
    hidden = hidden.defined() ? hidden.logical_or(masked) : masked;
  }
  return hidden;
}

at::Tensor softmax_of_visible(const at::Tensor& scores, const at::Tensor& hidden) {
  if (!hidden.defined()) return at::softmax(scores, -1);
  // A row without any visible key would be 0/0: its scores are left alone, and its weights set to 0
  // afterwards.
  const at::Tensor blind = hidden.all(-1, true);
  return at::softmax(scores.masked_fill(hidden.logical_and(blind.logical_not()),
                                        -std::numeric_limits<double>::infinity()),
                     -1)
      .masked_fill(blind, 0.0);
}

}  // namespace

at::Tensor plain_attention(const at::Tensor& qkv, std::int64_t num_heads,
                           const AttentionOptions& options) {
  const at::Tensor key_mask = key_mask_of(options, qkv);
  const Heads heads = split_heads(qkv, num_heads, options);
  const std::int64_t head_size = heads.q.size(3);
  const auto join = [&](const at::Tensor& y) {  // (B, H, T, D) -> (B, T, H D)
    return y.transpose(1, 2).reshape({qkv.size(0), qkv.size(1), num_heads * head_size});
  };
#ifdef HEADROOM_HAS_FUSED_ATTENTION
  if (!qkv.is_cpu() && !key_mask.defined()) {
    return join(at::scaled_dot_product_attention(heads.q, heads.k, heads.v, {}, options.dropout_p,
                                                 options.causal));
  }
#endif
  const at::Tensor scores = at::matmul(heads.q, heads.k.transpose(-2, -1)) *
                            (1.0 / std::sqrt(static_cast<double>(head_size)));  // (B, H, T, T)
  const at::Tensor hidden = hidden_keys(options.causal, key_mask, qkv);
  at::Tensor weights = softmax_of_visible(scores, hidden);
  if (options.dropout_p > 0.0) weights = at::dropout(weights, options.dropout_p, true);
  return join(at::matmul(weights, heads.v));
}

at::Tensor plain_layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            double eps) {
  return at::layer_norm(x, {x.size(-1)}, optional(weight), optional(bias), eps);
}

at::Tensor plain_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor y = x * at::rsqrt(x.pow(2).mean(-1, true) + eps);
  return weight.defined() ? y * weight : y;
}

at::Tensor plain_gelu(const at::Tensor& x, GeluKind kind) {
  if (kind == GeluKind::kQuick) return x * at::sigmoid(1.702 * x);
  return at::gelu(x, kind == GeluKind::kTanh ? "tanh" : "none");
}

at::Tensor plain_swiglu(const at::Tensor& x) {
  const std::int64_t width = x.size(-1) / 2;
  return at::silu(x.narrow(-1, 0, width)) * x.narrow(-1, width, width);
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
