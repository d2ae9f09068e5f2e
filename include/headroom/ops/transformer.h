#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
/// On the CPU in float (and in bf16 under autocast), no T x T matrix exists in forward or backward:
/// autograd keeps qkv, the output and two floats per query and head; tiles without a visible key
/// are skipped. Threads share the B K heads of keys. Values and gradients do not depend on the
/// number of threads. Dropout decisions come from one number drawn from LibTorch's default CPU
/// generator per call, and are made again in backward instead of being kept. Other types and
/// devices take LibTorch's own operations. Throws ConfigError when the sizes do not fit.
at::Tensor attention(const at::Tensor& qkv, std::int64_t num_heads,
                     const AttentionOptions& options = {});

/// Which Gaussian error linear unit: x Phi(x) itself, GPT-2's approximation of it by tanh, or the
/// one that OpenAI's CLIP was trained with, x sigmoid(1.702 x).
enum class GeluKind : int { kExact, kTanh, kQuick };

/// What a transformer block keeps for backward, from the most to the least; what is not kept is
/// computed again in backward. Values and gradients are bit-identical for all of them. Floats per
/// token, in units of the width C, the block's output included, with a hidden layer of 4 C: first
/// of a pre-norm block, then of a post-norm one, whose second sum is kept for the norm that is the
/// output. For a gated MLP, what is said of the GELU holds for the product of gate and up; a hidden
/// layer of F then takes 2 F before and F after it. What only gradients of weights without
/// requires_grad would need is not kept in any way.
enum class BlockKeep : int {
  kAll,     ///< 16, 16: norm, qkv 3, attention, sum; norm, hidden 4, GELU 4; output (one norm less,
            ///< one sum more)
  kNoGelu,  ///< 12, 12
  kNoGeluNorms,     ///< 10, 11
  kNoGeluNormsQkv,  ///<  7,  8
  kAttention,       ///<  3,  4: attention, sum, output; the hidden layer is computed again too
};
/// "keep", "no_gelu", "no_gelu_norms", "no_gelu_norms_qkv", "attention": the options of a stage, in
/// the order of BlockKeep; of a gated one with "product" in place of "gelu".
const std::vector<std::string>& block_keep_names(bool gated = false);

/// RMS norms subtract no mean and have no bias.
enum class NormKind : int { kLayer, kRms };

/// A low-rank addition to some rows of a linear layer (LoRA): rows [first_row, first_row + n) of
/// its output get scale * up(down(dropout(x))) more; see BlockOptions.
struct LowRank {
  at::Tensor down;  ///< (r, in)
  at::Tensor up;    ///< (n, r)
  std::int64_t first_row = 0;
};

/// The first half of a block, with H heads of queries and K of keys and values of size D (C = H D
/// and K = H in most models). Biases may be undefined. Linear weights are (out, in).
struct AttentionWeights {
  at::Tensor norm_weight, norm_bias;  ///< (C)
  at::Tensor qkv_weight, qkv_bias;    ///< ((H + 2 K) D, C), ((H + 2 K) D)
  at::Tensor proj_weight, proj_bias;  ///< (C, H D), (C)
  std::vector<LowRank> qkv_adapters = {}, proj_adapters = {};
};
/// The second half. Its first two are undefined in mlp().
struct MlpWeights {
  at::Tensor norm_weight, norm_bias;      ///< (C)
  at::Tensor hidden_weight, hidden_bias;  ///< (F, C), (F); gated: (2 F, C), (2 F), gate before up
  at::Tensor out_weight, out_bias;        ///< (C, F), (C)
  std::vector<LowRank> hidden_adapters = {}, out_adapters = {};
};

struct BlockOptions {
  std::int64_t num_heads = 1;
  AttentionOptions attention;
  double residual_dropout_p = 0.0;  ///< of what each half adds to x; give 0 when not training
  NormKind norm = NormKind::kLayer;
  double norm_eps = 1e-5;
  bool gated = false;  ///< the MLP is out(silu(gate) * up) (SwiGLU), in gelu's place
  GeluKind gelu = GeluKind::kTanh;
  BlockKeep keep = BlockKeep::kAll;
  double adapter_scale = 1.0;
  double adapter_dropout_p = 0.0;  ///< of what adapters are given; give 0 when not training
};

/// x + dropout(proj(attention(qkv(norm(x))))), x (B, T, C). Without norm_weight there is no norm,
/// here and in mlp_residual.
at::Tensor attention_residual(const at::Tensor& x, const AttentionWeights& weights,
                              const BlockOptions& options);
/// x + dropout(out(gelu(hidden(norm(x))))), x (..., C); gated: silu(gate) * up in gelu's place.
at::Tensor mlp_residual(const at::Tensor& x, const MlpWeights& weights,
                        const BlockOptions& options);
/// Both halves: a pre-norm transformer block.
at::Tensor transformer_block(const at::Tensor& x, const AttentionWeights& attention,
                             const MlpWeights& mlp, const BlockOptions& options);
/// A post-norm block: norm2(y + dropout(out(gelu(hidden(y))))) with y = norm1(x +
/// dropout(proj(attention(qkv(x))))). The norm of each struct follows its half.
at::Tensor post_norm_block(const at::Tensor& x, const AttentionWeights& attention,
                           const MlpWeights& mlp, const BlockOptions& options);

/// out(gelu(hidden(x))), without norm and residual; options.num_heads and options.attention are not
/// used.
at::Tensor mlp(const at::Tensor& x, const MlpWeights& weights, const BlockOptions& options = {});

struct CrossEntropyOptions {
  enum class Reduction { kMean, kSum };
  Reduction reduction = Reduction::kMean;
  std::int64_t ignore_index = -100;  ///< items with this target count for nothing
  at::Tensor item_weights;  ///< shape of targets; undefined: 1 each. A mean divides by their sum.
                            ///< Gets no gradient
  at::Tensor bias;          ///< (V), added to the logits; undefined: none. Gets its gradient
};

/// Cross-entropy of the logits hidden * weight^T + bias without making all the logits: hidden (...,
/// C), weight (V, C), targets (...) int64. Returns a scalar. As in PyTorch, the mean over no items
/// at all is NaN, and its gradients are 0.
///
/// On the CPU in float (and in bf16 under autocast, where logits are floats all the same), logits
/// exist for a few hundred rows at a time. Where gradients are wanted
/// they are made in forward, chunk by chunk, and kept instead of hidden and weight; backward hands
/// them out, times its incoming gradient. It can therefore run only once per forward. Throws
/// DataError for a target that is neither in [0, V) nor ignore_index.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace headroom
