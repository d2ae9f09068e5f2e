#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

namespace headroom {

/// Allocations of tensors, with memory or without, are numbered together.
inline std::atomic<std::uint64_t> last_allocation_number{0};

/// The number of the allocation behind a meta tensor; 0 when the shape meter did not count it.
std::uint64_t shape_allocation_number(const at::Tensor& tensor);

}  // namespace headroom
