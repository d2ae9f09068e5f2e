#pragma once

#include "core/mapped_pages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

namespace headroom {

/// Fills a tensor whose memory has no gaps. On the meta device, where only sizes matter, nothing is
/// written; of memory that is on disk, no more than a piece is in memory at once.
inline void fill_with_zeros(const at::Tensor& tensor) {
  constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;
  if (tensor.is_meta()) return;
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1});
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kPieceElements) {
    flat.slice(0, begin, std::min(begin + kPieceElements, flat.numel())).zero_();
    release_mapped_pages(flat.data_ptr());
  }
}

/// Zeros for the state of a parameter.
inline at::Tensor zeroed(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options.requires_grad(false));
  fill_with_zeros(tensor);
  return tensor;
}

/// The same with the sizes, strides, type and device of `like`.
inline at::Tensor zeroed_like(const at::Tensor& like) {
  at::Tensor tensor =
      at::empty_like(like, like.options().requires_grad(false), at::MemoryFormat::Preserve);
  fill_with_zeros(tensor);
  return tensor;
}

}  // namespace headroom
