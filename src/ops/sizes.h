#pragma once

#include <headroom/ops/transformer.h>

#include <ATen/core/Tensor.h>

namespace headroom::ops {

/// Throws ConfigError, with the sizes, unless x is (B, T, C), rows of `qkv_width` channels can be
/// shared by the heads of queries, keys and values, and the mask or the lengths fit x.
void check_attention_sizes(const at::Tensor& x, std::int64_t qkv_width, std::int64_t num_heads,
                           const AttentionOptions& options);

/// The keys that may be seen, (B, T) bool, contiguous, on the device of `like`; undefined when all
/// may.
at::Tensor key_mask_of(const AttentionOptions& options, const at::Tensor& like);

/// Throws ConfigError, naming `what`, unless the tensor has exactly these sizes.
void check_sizes(const at::Tensor& tensor, at::IntArrayRef sizes, const char* what);

/// Throws DataError, naming `what`, unless every element of the int64 tensor is in [0, end) or
/// equal to `allowed`. Meta tensors pass.
void check_range(const at::Tensor& indices, std::int64_t end, std::int64_t allowed,
                 const char* what);

}  // namespace headroom::ops
