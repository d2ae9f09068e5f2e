#pragma once

#include <headroom/ops/attention.h>
#include <headroom/ops/gelu.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

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

}  // namespace headroom
