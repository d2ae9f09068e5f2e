#pragma once

// An update whose optimizer state passes through memory in pieces.

#include <headroom/optim/optimizer.h>
#include "memory/spill_store.h"

#include <cstdint>
#include <memory>

namespace headroom {

/// Of one tensor of state.
inline constexpr std::int64_t kStatePieceBytes = std::int64_t{4} << 20;

/// Bytes of the buffers for a parameter of so many bytes whose state has `state_bytes`; 0 where the
/// state is no multiple of the parameter.
std::int64_t state_stream_bytes(std::int64_t parameter_bytes, std::int64_t state_bytes,
                                std::int64_t piece_bytes = kStatePieceBytes);

/// Updates a contiguous parameter that is in memory with its gradient, and whose state is allocated
/// on mappings of `store`, exactly as LeanOptimizer::step_parameter() would: one piece is updated
/// while the next one is read and the last one written. Throws BudgetError and DataError when the
/// disk fails; the parameter and its state are then in an undefined state.
void step_streaming(const std::shared_ptr<SpillStore>& store, LeanOptimizer& optimizer,
                    at::Tensor& parameter, std::size_t group,
                    std::int64_t piece_bytes = kStatePieceBytes);

}  // namespace headroom
