#pragma once

// The differences between LibTorch 1.13 and 2.x that this project meets, and nothing else.

#include <c10/core/Allocator.h>
#include <torch/version.h>

#include <type_traits>

#define HEADROOM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// c10::Allocator::allocate lost its const in 2.3, and gained copy_data.
#if HEADROOM_TORCH_AT_LEAST(2, 3)
#define HEADROOM_ALLOCATE_CONST
#define HEADROOM_DEFINE_COPY_DATA                                                    \
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { \
    default_copy_data(to, from, num_bytes);                                          \
  }
#define HEADROOM_DEFINE_COPY_NOTHING \
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*num_bytes*/) const override {}
#else
#define HEADROOM_ALLOCATE_CONST const
#define HEADROOM_DEFINE_COPY_DATA
#define HEADROOM_DEFINE_COPY_NOTHING
#endif

// The backtrace of a c10::Error became an object in 2.5; this one is empty.
#if HEADROOM_TORCH_AT_LEAST(2, 5)
#define HEADROOM_NO_BACKTRACE nullptr
#else
#define HEADROOM_NO_BACKTRACE ""
#endif

// at::scaled_dot_product_attention took its present form in 2.1.
#if HEADROOM_TORCH_AT_LEAST(2, 1)
#define HEADROOM_HAS_FUSED_ATTENTION
#endif

// at::autocast asks for a device from 2.4 on; before, each device had functions of its own. (Users
// include ATen/autocast_mode.h.)
#if HEADROOM_TORCH_AT_LEAST(2, 4)
#define HEADROOM_AUTOCAST_CPU_ENABLED() at::autocast::is_autocast_enabled(at::kCPU)
#define HEADROOM_AUTOCAST_SET_CPU_ENABLED(on) at::autocast::set_autocast_enabled(at::kCPU, on)
#define HEADROOM_AUTOCAST_CPU_DTYPE() at::autocast::get_autocast_dtype(at::kCPU)
#define HEADROOM_AUTOCAST_SET_CPU_DTYPE(dtype) at::autocast::set_autocast_dtype(at::kCPU, dtype)
#define HEADROOM_AUTOCAST_CUDA_ENABLED() at::autocast::is_autocast_enabled(at::kCUDA)
#define HEADROOM_AUTOCAST_SET_CUDA_ENABLED(on) at::autocast::set_autocast_enabled(at::kCUDA, on)
#define HEADROOM_AUTOCAST_CUDA_DTYPE() at::autocast::get_autocast_dtype(at::kCUDA)
#define HEADROOM_AUTOCAST_SET_CUDA_DTYPE(dtype) at::autocast::set_autocast_dtype(at::kCUDA, dtype)
#else
#define HEADROOM_AUTOCAST_CPU_ENABLED() at::autocast::is_cpu_enabled()
#define HEADROOM_AUTOCAST_SET_CPU_ENABLED(on) at::autocast::set_cpu_enabled(on)
#define HEADROOM_AUTOCAST_CPU_DTYPE() at::autocast::get_autocast_cpu_dtype()
#define HEADROOM_AUTOCAST_SET_CPU_DTYPE(dtype) at::autocast::set_autocast_cpu_dtype(dtype)
#define HEADROOM_AUTOCAST_CUDA_ENABLED() at::autocast::is_enabled()
#define HEADROOM_AUTOCAST_SET_CUDA_ENABLED(on) at::autocast::set_enabled(on)
#define HEADROOM_AUTOCAST_CUDA_DTYPE() at::autocast::get_autocast_gpu_dtype()
#define HEADROOM_AUTOCAST_SET_CUDA_DTYPE(dtype) at::autocast::set_autocast_gpu_dtype(dtype)
#endif

namespace headroom {

// c10d::TCPStoreOptions gained useLibUV in the course of 2.x, later on by default; not every build
// of LibTorch has libuv.
template <typename Options, typename = void>
struct LibUv {
  static void switch_off(Options& /*options*/) {}
};
template <typename Options>
struct LibUv<Options, std::void_t<decltype(Options::useLibUV)>> {
  static void switch_off(Options& options) { options.useLibUV = false; }
};

}  // namespace headroom
