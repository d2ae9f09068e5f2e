#pragma once

// What the functions of layer ops must equal, written with LibTorch's plain operations, and ways to
// compare.

#include <headroom/ops/transformer.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace headroom::reference {

using torch::Tensor;

inline Tensor attention(const Tensor& qkv, std::int64_t num_heads, bool causal,
                        const Tensor& key_mask = {}, const Tensor& keep = {}) {
  const auto B = qkv.size(0), T = qkv.size(1), C = qkv.size(2) / 3, D = C / num_heads;
  const auto parts = qkv.split(C, 2);
  const auto heads = [&](const Tensor& t) {
    return t.reshape({B, T, num_heads, D}).transpose(1, 2);
  };
  Tensor scores = torch::matmul(heads(parts[0]), heads(parts[1]).transpose(-2, -1)) /
                  std::sqrt(static_cast<double>(D));
  Tensor visible = torch::ones({B, 1, T, T}, torch::kBool);
  if (causal) visible = visible.logical_and(torch::ones({T, T}, torch::kBool).tril());
  if (key_mask.defined()) visible = visible.logical_and(key_mask.view({B, 1, 1, T}));
  // A row without any visible key becomes uniform, and then 0.
  scores = scores.masked_fill(visible.logical_not(), -1e30);
  Tensor weights = torch::softmax(scores, -1).masked_fill(visible.logical_not(), 0.0);
  if (keep.defined()) weights = weights * keep;
  return torch::matmul(weights, heads(parts[2])).transpose(1, 2).reshape({B, T, C});
}

inline Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensor centered = x - x.mean(-1, true);
  Tensor y = centered / (centered.pow(2).mean(-1, true) + eps).sqrt();
  if (weight.defined()) y = y * weight;
  return bias.defined() ? y + bias : y;
}

inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor y = x / (x.pow(2).mean(-1, true) + eps).sqrt();
  return weight.defined() ? y * weight : y;
}

/// Attention whose keys and values are shared by heads of queries, with rotary positions. The
/// angles are those of the options in float, as the function promises; the rest is in the type of
/// qkv.
inline Tensor grouped_attention(const Tensor& qkv, std::int64_t num_heads,
                                const AttentionOptions& options) {
  const auto B = qkv.size(0), T = qkv.size(1), K = options.num_kv_heads.value_or(num_heads),
             D = qkv.size(2) / (num_heads + 2 * K);
  const auto heads = [&](std::int64_t first, std::int64_t count) {  // (B, T, count, D)
    return qkv.slice(2, first * D, (first + count) * D).reshape({B, T, count, D});
  };
  const auto turned = [&](const Tensor& x) {
    if (!options.rotary) return x;
    std::vector<float> angles;
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t j = 0; j < D; ++j) {
        const double exponent = -2.0 * static_cast<double>(j % (D / 2)) / static_cast<double>(D);
        angles.push_back(static_cast<float>(t) *
                         static_cast<float>(std::pow(options.rotary->theta, exponent)));
      }
    }
    const Tensor angle = torch::tensor(angles).to(torch::kDouble).view({1, T, 1, D});
    const Tensor half_turned =
        torch::cat({-x.slice(3, D / 2), x.slice(3, 0, D / 2)}, 3);  // a quarter turn of each pair
    return x * angle.cos().to(x.scalar_type()) + half_turned * angle.sin().to(x.scalar_type());
  };
  const auto repeated = [&](const Tensor& x) {
    return x.repeat_interleave(num_heads / K, 2).reshape({B, T, num_heads * D});
  };
  const Tensor q = turned(heads(0, num_heads)).reshape({B, T, num_heads * D});
  return attention(
      torch::cat({q, repeated(turned(heads(num_heads, K))), repeated(heads(num_heads + K, K))}, 2),
      num_heads, options.causal, options.key_mask);
}

inline Tensor gelu(const Tensor& x, GeluKind kind) {
  if (kind == GeluKind::kQuick) return x / (1 + torch::exp(-1.702 * x));
  if (kind == GeluKind::kExact) return x * 0.5 * (1 + torch::erf(x / std::sqrt(2.0)));
  return x * 0.5 * (1 + torch::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x.pow(3))));
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor y = torch::matmul(x, weight.t());
  return bias.defined() ? y + bias : y;
}

/// keep: what dropout multiplies the outputs of the two halves by; undefined: 1.
inline Tensor block(const Tensor& x, const AttentionWeights& a, const MlpWeights& m,
                    const BlockOptions& o, const std::array<Tensor, 2>& keep = {}) {
  const auto dropped = [&](const Tensor& t, const Tensor& k) {
    return k.defined() ? t * k.to(t.scalar_type()).view(t.sizes()) : t;
  };
  const Tensor qkv =
      linear(layer_norm(x, a.norm_weight, a.norm_bias, o.norm_eps), a.qkv_weight, a.qkv_bias);
  const Tensor attended = attention(qkv, o.num_heads, o.attention.causal, o.attention.key_mask);
  const Tensor sum = x + dropped(linear(attended, a.proj_weight, a.proj_bias), keep[0]);
  const Tensor hidden = linear(layer_norm(sum, m.norm_weight, m.norm_bias, o.norm_eps),
                               m.hidden_weight, m.hidden_bias);
  return sum + dropped(linear(gelu(hidden, o.gelu), m.out_weight, m.out_bias), keep[1]);
}

/// A block with RMS norms, grouped attention and a gated MLP.
inline Tensor gated_block(const Tensor& x, const AttentionWeights& a, const MlpWeights& m,
                          const BlockOptions& o) {
  const Tensor qkv = linear(rms_norm(x, a.norm_weight, o.norm_eps), a.qkv_weight, a.qkv_bias);
  const Tensor attended = grouped_attention(qkv, o.num_heads, o.attention);
  const Tensor sum = x + linear(attended, a.proj_weight, a.proj_bias);
  const auto hidden =
      linear(rms_norm(sum, m.norm_weight, o.norm_eps), m.hidden_weight, m.hidden_bias).chunk(2, -1);
  return sum + linear(hidden[0] * torch::sigmoid(hidden[0]) * hidden[1], m.out_weight, m.out_bias);
}

/// The same with the norms after the halves.
inline Tensor post_norm_block(const Tensor& x, const AttentionWeights& a, const MlpWeights& m,
                              const BlockOptions& o, const std::array<Tensor, 2>& keep = {}) {
  const auto dropped = [&](const Tensor& t, const Tensor& k) {
    return k.defined() ? t * k.to(t.scalar_type()).view(t.sizes()) : t;
  };
  const Tensor attended = attention(linear(x, a.qkv_weight, a.qkv_bias), o.num_heads,
                                    o.attention.causal, o.attention.key_mask);
  const Tensor y = layer_norm(x + dropped(linear(attended, a.proj_weight, a.proj_bias), keep[0]),
                              a.norm_weight, a.norm_bias, o.norm_eps);
  const Tensor hidden = gelu(linear(y, m.hidden_weight, m.hidden_bias), o.gelu);
  return layer_norm(y + dropped(linear(hidden, m.out_weight, m.out_bias), keep[1]), m.norm_weight,
                    m.norm_bias, o.norm_eps);
}

inline Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight,
                                   const Tensor& targets, const CrossEntropyOptions& options) {
  const Tensor log_p =
      torch::log_softmax(linear(hidden.reshape({-1, hidden.size(-1)}), weight, options.bias), -1);
  const Tensor flat = targets.reshape({-1});
  const Tensor counts = flat.ne(options.ignore_index).to(torch::kDouble);
  const Tensor weights = options.item_weights.defined()
                             ? options.item_weights.reshape({-1}).to(torch::kDouble) * counts
                             : counts;
  const Tensor picked = log_p.gather(1, flat.clamp_min(0).unsqueeze(1)).squeeze(1);
  const Tensor sum = -(picked * weights).sum();
  return options.reduction == CrossEntropyOptions::Reduction::kSum ? sum : sum / weights.sum();
}

/// The largest difference, relative to the largest value expected; absolute where only rounding is
/// expected (a gradient that is 0).
inline double difference(const Tensor& actual, const Tensor& expected) {
  if (!actual.defined() || !expected.defined())
    return actual.defined() == expected.defined() ? 0.0 : HUGE_VAL;
  if (actual.sizes() != expected.sizes()) return HUGE_VAL;
  if (expected.numel() == 0) return 0.0;
  const Tensor e = expected.detach().to(torch::kDouble);
  const double error = (actual.detach().to(torch::kDouble) - e).abs().max().item<double>(),
               largest = e.abs().max().item<double>();
  return std::isfinite(error) ? error / (largest < 1e-9 ? 1.0 : largest) : HUGE_VAL;
}

/// What `difference` may be for results computed in `type`.
inline double tolerance_of(torch::ScalarType type) { return type == torch::kDouble ? 1e-10 : 1e-5; }

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

/// Output and gradients of `function` at copies of the inputs in `type`, for a fixed random
/// direction of the output.
inline std::vector<Tensor> run(const Function& function, const std::vector<Tensor>& inputs,
                               torch::ScalarType type) {
  std::vector<Tensor> leaves;
  for (const Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach().to(type).clone().requires_grad_(true)
                                     : Tensor());
  }
  const Tensor out = function(leaves);
  const auto direction = torch::cos(torch::arange(out.numel(), torch::kDouble) * 0.7 + 0.3)
                             .reshape(out.sizes())
                             .to(type);
  out.backward(out.dim() == 0 ? Tensor() : direction);
  std::vector<Tensor> results{out.detach()};
  for (const Tensor& leaf : leaves) results.push_back(leaf.defined() ? leaf.grad() : Tensor());
  return results;
}

/// Value and every gradient of `function` (in float) equal those of `reference` (in double).
inline void expect_equal(const Function& function, const Function& reference,
                         const std::vector<Tensor>& inputs, double tolerance,
                         torch::ScalarType type = torch::kFloat) {
  const std::vector<Tensor> actual = run(function, inputs, type),
                            expected = run(reference, inputs, torch::kDouble);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(difference(actual[i], expected[i]), tolerance)
        << (i == 0 ? std::string("value") : "gradient " + std::to_string(i - 1));
  }
}

/// Errors of each result, summed over cases, against the reference in double: of the function and
/// of the reference itself, both in float.
struct FloatErrors {
  std::vector<double> ours, plain;

  void add(const Function& function, const Function& reference, const std::vector<Tensor>& inputs) {
    const std::vector<Tensor> expected = run(reference, inputs, torch::kDouble),
                              actual = run(function, inputs, torch::kFloat),
                              rounded = run(reference, inputs, torch::kFloat);
    ours.resize(expected.size());
    plain.resize(expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ours[i] += difference(actual[i], expected[i]);
      plain[i] += difference(rounded[i], expected[i]);
    }
  }
};

/// The gradients of `function` in double are those of central differences.
inline void expect_finite_differences(const Function& function, const std::vector<Tensor>& inputs) {
  constexpr double kStep = 1e-5;
  std::vector<Tensor> at;
  for (const Tensor& input : inputs)
    at.push_back(input.defined() ? input.detach().to(torch::kDouble).clone() : Tensor());
  const std::vector<Tensor> results = run(function, at, torch::kDouble);
  const Tensor direction = torch::cos(torch::arange(results[0].numel(), torch::kDouble) * 0.7 + 0.3)
                               .reshape(results[0].sizes());
  const torch::NoGradGuard no_grad;
  const auto value = [&] {
    return results[0].dim() == 0 ? function(at).item<double>()
                                 : (function(at) * direction).sum().item<double>();
  };
  for (std::size_t i = 0; i < at.size(); ++i) {
    if (!at[i].defined()) continue;
    const double largest = std::max(1.0, results[i + 1].abs().max().item<double>());
    double* element = at[i].data_ptr<double>();
    for (std::int64_t j = 0; j < at[i].numel(); ++j) {
      const double before = element[j];
      element[j] = before + kStep;
      const double up = value();
      element[j] = before - kStep;
      const double down = value();
      element[j] = before;
      EXPECT_NEAR((up - down) / (2 * kStep), results[i + 1].reshape({-1})[j].item<double>(),
                  1e-7 * largest)
          << "input " << i << " at " << j;
    }
  }
}

inline bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && !torch::equal(a[i], b[i])))
      return false;
  }
  return true;
}

}  // namespace headroom::reference
