#pragma once

// The differences between LibTorch 1.13 and 2.x that this project meets, and nothing else.

#include <c10/core/Allocator.h>
#include <torch/version.h>

#define HEADROOM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// c10::Allocator::allocate lost its const in 2.3, and gained copy_data.
#if HEADROOM_TORCH_AT_LEAST(2, 3)
#define HEADROOM_ALLOCATE_CONST
#define HEADROOM_DEFINE_COPY_DATA \
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { default_copy_data(to, from, num_bytes); }
#else
#define HEADROOM_ALLOCATE_CONST const
#define HEADROOM_DEFINE_COPY_DATA
#endif

// at::scaled_dot_product_attention took its present form in 2.1.
#if HEADROOM_TORCH_AT_LEAST(2, 1)
#define HEADROOM_HAS_FUSED_ATTENTION
#endif
