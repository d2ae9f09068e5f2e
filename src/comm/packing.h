#pragma once

// Many small messages as few: what travels in place, and what travels together in scratch memory.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace headroom {

/// How the elements of a tensor travel.
enum class Wire {
  kNumbers,  ///< as numbers of their own type, bf16 as fp32
  kBytes,    ///< as the bytes that they are
};

/// Bytes of scratch memory that exchange_packed() needs: at most 1 MiB.
std::int64_t packed_bytes(const std::vector<at::Tensor>& tensors, Wire wire);

/// Calls `exchange` with flat, dense tensors that hold every element of `tensors` once, and takes
/// over what it makes of them. Calls and their sizes depend on the tensors' sizes and types alone.
/// `scratch` may be undefined; then it is allocated where it is needed.
void exchange_packed(const std::vector<at::Tensor>& tensors, Wire wire, at::Tensor scratch,
                     const std::function<void(at::Tensor& flat)>& exchange);

}  // namespace headroom
