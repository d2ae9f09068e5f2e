#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace headroom {

/// How the frequencies of rotary positions are stretched for texts longer than a model was first
/// trained on, as Llama 3.1 does it: wavelengths above original_length / low_frequency_factor are
/// made `factor` times as long, those below original_length / high_frequency_factor stay, and
/// between the two it goes over smoothly.
struct RotaryScaling {
  double factor = 8.0;
  double low_frequency_factor = 1.0;
  double high_frequency_factor = 4.0;
  std::int64_t original_length = 8192;
};

/// Rotary positions: channels j and j + D / 2 of every query and key of position t are turned
/// together by the angle t * theta^(-2j / D), after their bias. (Hugging Face's order of channels;
/// angles are rounded to float as there.)
struct RotaryOptions {
  double theta = 10000.0;
  std::optional<RotaryScaling> scaling;
};

struct AttentionOptions {
  bool causal = false;     ///< position t sees positions 0..t only
  at::Tensor key_mask;     ///< (B, T) bool, true where the key may be seen; undefined: all
  at::Tensor key_lengths;  ///< (B) integers: the first key_lengths[b] keys may be seen; instead of
                           ///< key_mask
  at::Tensor first_keys;   ///< (B, T) int32, not falling along T: position t sees no key before
                           ///< first_keys[b, t] <= t, so that a row holds several texts; needs
                           ///< causal, and none of the two above
  double dropout_p = 0.0;  ///< of the attention weights; give 0 when not training
  std::optional<std::int64_t> num_kv_heads;  ///< heads of keys and values, each shared by an equal
                                             ///< number of heads of queries; absent: as many
  std::optional<RotaryOptions> rotary;       ///< absent: positions are not turned
};

/// Multi-head scaled dot-product attention. qkv is (B, T, (H + 2 K) D) as one linear layer makes
/// it: H = num_heads queries, K keys, K values, each of size D; K is options.num_kv_heads, or H.
/// Returns (B, T, H D). A query that may see no key gives 0.
///
/// On the CPU in float, no T x T matrix exists in forward or backward: autograd keeps qkv, the
/// output and two floats per query and head; tiles without a visible key are skipped. Threads share
/// the B K heads of keys. Values and gradients do not depend on the number of threads. Dropout
/// decisions come from one number drawn from LibTorch's default CPU generator per call, and are
/// made again in backward instead of being kept. Other types and devices take LibTorch's own
/// operations. Throws ConfigError when the sizes do not fit.
at::Tensor attention(const at::Tensor& qkv, std::int64_t num_heads,
                     const AttentionOptions& options = {});

}  // namespace headroom
