#pragma once

#include "core/parallel.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace headroom {

/// Elements per thread below which splitting costs more than it gains.
inline constexpr std::int64_t kElementsPerTask = 32768;

/// True if these tensors are floats on the CPU that fill their memory in one and the same order, so
/// that they can be walked as flat arrays.
inline bool are_dense_floats(std::initializer_list<const at::Tensor*> tensors) {
  const at::Tensor& first = **tensors.begin();
  return std::all_of(tensors.begin(), tensors.end(), [&first](const at::Tensor* tensor) {
    return tensor->layout() == at::kStrided && tensor->device().is_cpu() &&
           tensor->scalar_type() == at::kFloat && tensor->is_non_overlapping_and_dense() &&
           tensor->sizes() == first.sizes() && tensor->strides() == first.strides();
  });
}

/// Calls body(begin, end) for ranges of 0..count on all threads.
template <typename Body>
void for_ranges(std::int64_t count, const Body& body) {
  parallel_for(0, count, kElementsPerTask, body);
}

}  // namespace headroom
