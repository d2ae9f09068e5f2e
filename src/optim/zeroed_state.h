#pragma once

#include <ATen/ATen.h>

namespace headroom {

/// Zeros for the state of a parameter. On the meta device, where only sizes matter, nothing is
/// written.
inline at::Tensor zeroed(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options.requires_grad(false));
  if (!tensor.is_meta()) tensor.zero_();
  return tensor;
}

/// The same with the sizes, strides, type and device of `like`.
inline at::Tensor zeroed_like(const at::Tensor& like) {
  at::Tensor tensor =
      at::empty_like(like, like.options().requires_grad(false), at::MemoryFormat::Preserve);
  if (!tensor.is_meta()) tensor.zero_();
  return tensor;
}

}  // namespace headroom
