#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headroom {

struct AttentionOptions {
  bool causal = false;     ///< position t sees positions 0..t only
  at::Tensor key_mask;     ///< (B, T) bool, true where the key may be seen; undefined: all
  at::Tensor key_lengths;  ///< (B) integers: the first key_lengths[b] keys may be seen; instead of
                           ///< key_mask
  double dropout_p = 0.0;  ///< of the attention weights; give 0 when not training
};

/// Multi-head scaled dot-product attention. qkv is (B, T, 3C) as one linear layer makes it:
/// queries, keys, values, each C = num_heads x D. Returns (B, T, C). A query that may see no key
/// gives 0.
///
/// On the CPU in float, no T x T matrix exists in forward or backward: autograd keeps qkv, the
/// output and two floats per query and head; tiles without a visible key are skipped. Values and
/// gradients do not depend on the number of threads. Dropout decisions come from one number drawn
/// from LibTorch's default CPU generator per call, and are made again in backward instead of being
/// kept. Other types and devices take LibTorch's own operations. Throws ConfigError when the sizes
/// do not fit.
at::Tensor attention(const at::Tensor& qkv, std::int64_t num_heads,
                     const AttentionOptions& options = {});

}  // namespace headroom
