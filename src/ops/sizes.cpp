#include "ops/sizes.h"

#include <headroom/core/error.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace headroom::ops {

void check_sizes(const at::Tensor& tensor, at::IntArrayRef sizes, const char* what) {
  if (tensor.sizes() == sizes) return;
  throw ConfigError(fmt::format("{} is ({}), but must be ({})", what,
                                fmt::join(tensor.sizes(), ", "), fmt::join(sizes, ", ")));
}

void check_attention_sizes(const at::Tensor& x, std::int64_t qkv_width, std::int64_t num_heads,
                           const AttentionOptions& options) {
  if (x.dim() != 3)
    throw ConfigError(
        fmt::format("attention is given {} dimensions, but needs 3: (B, T, channels)", x.dim()));
  const std::int64_t num_kv_heads = options.num_kv_heads.value_or(num_heads);
  if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    throw ConfigError(
        fmt::format("{} heads of queries cannot share {} heads of keys and values: give a divisor",
                    num_heads, num_kv_heads));
  }
  const std::int64_t parts = num_heads + 2 * num_kv_heads, head_size = qkv_width / parts;
  if (qkv_width % parts != 0) {
    throw ConfigError(
        fmt::format("{} channels of queries, keys and values cannot be shared by {} heads and 2 x "
                    "{} of keys and values: give a multiple of {}",
                    qkv_width, num_heads, num_kv_heads, parts));
  }
  if (options.rotary && head_size % 2 != 0) {
    throw ConfigError(fmt::format(
        "rotary positions turn pairs of channels, but a head has {}: give an even number",
        head_size));
  }
  if (options.key_mask.defined() && options.key_lengths.defined())
    throw ConfigError("give key_mask or key_lengths, not both");
  if (options.first_keys.defined() &&
      (options.key_mask.defined() || options.key_lengths.defined() || !options.causal))
    throw ConfigError("first_keys are for causal attention without key_mask and key_lengths");
  if (options.first_keys.defined())
    check_sizes(options.first_keys, {x.size(0), x.size(1)}, "first_keys");
  if (options.key_mask.defined()) check_sizes(options.key_mask, {x.size(0), x.size(1)}, "key_mask");
  if (options.key_lengths.defined()) check_sizes(options.key_lengths, {x.size(0)}, "key_lengths");
}

at::Tensor key_mask_of(const AttentionOptions& options, const at::Tensor& like) {
  if (options.first_keys.defined())
    return options.first_keys.to(like.device(), at::kInt).contiguous();
  if (options.key_mask.defined()) return options.key_mask.to(like.device(), at::kBool).contiguous();
  if (!options.key_lengths.defined()) return {};
  const at::Tensor positions = at::arange(like.size(1), options.key_lengths.options());
  return positions.unsqueeze(0).lt(options.key_lengths.unsqueeze(1)).to(like.device()).contiguous();
}

void check_range(const at::Tensor& indices, std::int64_t end, std::int64_t allowed,
                 const char* what) {
  if (indices.is_meta() || !indices.is_cpu()) return;
  const at::Tensor flat = indices.contiguous();
  const std::int64_t* values = flat.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    if ((values[i] < 0 || values[i] >= end) && values[i] != allowed) {
      throw DataError(fmt::format(
          "{} {} at position {} is outside of [0, {}): does the data belong to this model?", what,
          values[i], i, end));
    }
  }
}

}  // namespace headroom::ops
