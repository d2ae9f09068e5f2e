#pragma once

namespace headroom {

/// Adds kernels for the meta device where LibTorch has none. They allocate what the CPU's kernels
/// do. Call once.
void register_shape_kernels();

}  // namespace headroom
