#pragma once

#include <headroom/ops/transformer.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headroom {

/// Keys, turned to their positions, and values of the tokens of one text that a block has seen.
struct KeyValueCache {
  /// Room for `capacity` tokens of the type and device of `like`.
  KeyValueCache(std::int64_t num_kv_heads, std::int64_t capacity, std::int64_t head_size,
                const at::Tensor& like);

  at::Tensor keys, values;  ///< (K, capacity, D)
  std::int64_t length = 0;  ///< tokens that are there
};

/// Causal attention of new tokens to all of the cache and to those before them, whose keys and
/// values are then in the cache too. qkv (1, T, (H + 2 K) D) as attention() has it, its bias added;
/// returns (1, T, H D). T is 1 unless the cache is empty. No gradients, masks or dropout.
at::Tensor cached_attention(const at::Tensor& qkv, std::int64_t num_heads,
                            const AttentionOptions& options, KeyValueCache& cache);

}  // namespace headroom
