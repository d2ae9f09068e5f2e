#include "ops/cached_attention.h"

#include "ops/rotary.h"
#include "ops/sizes.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

namespace headroom {

KeyValueCache::KeyValueCache(std::int64_t num_kv_heads, std::int64_t capacity,
                             std::int64_t head_size, const at::Tensor& like)
    : keys(at::empty({num_kv_heads, capacity, head_size}, like.options().requires_grad(false))),
      values(at::empty_like(keys)) {}

at::Tensor cached_attention(const at::Tensor& qkv, std::int64_t num_heads,
                            const AttentionOptions& options, KeyValueCache& cache) {
  ops::check_attention_sizes(qkv, qkv.size(-1), num_heads, options);
  const at::NoGradGuard no_grad;
  const std::int64_t num_kv_heads = cache.keys.size(0), size = cache.keys.size(2),
                     count = qkv.size(1), first = cache.length, length = first + count;
  TORCH_CHECK(length <= cache.keys.size(1) && (first == 0 || count == 1), "a cache of ",
              cache.keys.size(1), " tokens with ", first, " in it cannot take ", count);
  const at::Tensor heads = qkv.view({count, num_heads + 2 * num_kv_heads, size}).transpose(0, 1);
  at::Tensor queries = heads.narrow(0, 0, num_heads),  // (H, T, D)
      keys = heads.narrow(0, num_heads, num_kv_heads);
  if (options.rotary) {
    const at::Tensor table = ops::rotary_table(*options.rotary, first, count, size, qkv);
    queries = ops::rotate(queries, table);
    keys = ops::rotate(keys, table);
  }
  cache.keys.narrow(1, first, count).copy_(keys);
  cache.values.narrow(1, first, count)
      .copy_(heads.narrow(0, num_heads + num_kv_heads, num_kv_heads));
  cache.length = length;
  if (first == 0 && count > 1) return attention(qkv, num_heads, options);  // no T x T matrix
  const at::Tensor scores =  // (K, heads of queries of each, length)
      at::bmm(queries.reshape({num_kv_heads, num_heads / num_kv_heads, size}),
              cache.keys.narrow(1, 0, length).transpose(1, 2)) *
      (1.0 / std::sqrt(static_cast<double>(size)));
  return at::bmm(at::softmax(scores, -1), cache.values.narrow(1, 0, length))
      .view({1, 1, num_heads * size});
}

}  // namespace headroom
