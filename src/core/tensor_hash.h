#pragma once

#include "core/hash.h"
#include "core/mapped_pages.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace headroom {

/// Of the values, bit for bit: two NaNs of the same bits are the same. 0 for a tensor without
/// strided memory. Fast, and good enough to see a difference that nobody made on purpose.
inline std::uint64_t value_hash(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_meta()) return 0;
  const at::Tensor flat = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
  const std::size_t num_bytes = flat.nbytes();
  std::uint64_t hash = num_bytes;
  for (std::size_t i = 0; i < num_bytes; i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min(sizeof word, num_bytes - i));
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

/// Adds the values of a tensor, in the order of its dimensions, to a SHA-256.
inline void add_values(Sha256& hash, const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.detach().cpu().contiguous();
  for_each_mapped_piece(bytes.data_ptr(), bytes.nbytes(),
                        [&](const void* data, std::size_t size) { hash.update(data, size); });
}

}  // namespace headroom
