#include "headroom/execute/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/Context.h>
#include <fmt/format.h>

#include <cstdlib>

#include "headroom/core/error.h"
#include "headroom/core/runtime.h"
#include "headroom/core/torch_compat.h"

namespace headroom {
namespace {

#if !HEADROOM_TORCH_AT_LEAST(2, 0)
// The oneDNN of LibTorch 1.x runs AMX instructions wherever the CPU announces them; where the system does not let it, the program dies by
// an illegal instruction. Its AVX512-BF16 products are fast as well. oneDNN reads this at its first product, so it is set while the program
// is loaded, unless the user has decided.
const bool kOneDnnIsLimited = []() { return setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0) == 0; }();
#endif

bool is_enabled(c10::DeviceType device) {
  return device == c10::kCUDA ? HEADROOM_AUTOCAST_CUDA_ENABLED() : HEADROOM_AUTOCAST_CPU_ENABLED();
}

c10::ScalarType dtype_of(c10::DeviceType device) {
  return device == c10::kCUDA ? HEADROOM_AUTOCAST_CUDA_DTYPE() : HEADROOM_AUTOCAST_CPU_DTYPE();
}

void set(c10::DeviceType device, bool enabled, c10::ScalarType dtype) {
  if (device == c10::kCUDA) {
    HEADROOM_AUTOCAST_SET_CUDA_ENABLED(enabled);
    HEADROOM_AUTOCAST_SET_CUDA_DTYPE(dtype);
  } else {
    HEADROOM_AUTOCAST_SET_CPU_ENABLED(enabled);
    HEADROOM_AUTOCAST_SET_CPU_DTYPE(dtype);
  }
}

void check(c10::DeviceType device, c10::ScalarType dtype) {
  if (device != c10::kCPU && device != c10::kCUDA) {
    throw ConfigError(fmt::format("autocast is for cpu and cuda, not {}", c10::DeviceTypeName(device, /*lower_case=*/true)));
  }
  if (dtype == c10::kBFloat16 || (dtype == c10::kHalf && device == c10::kCUDA)) return;
  throw ConfigError(fmt::format("autocast on {} does not compute in {}; choose bf16{}", c10::DeviceTypeName(device, /*lower_case=*/true),
                                c10::toString(dtype), device == c10::kCUDA ? " or fp16" : ""));
}

}  // namespace

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype, bool enabled) : device_(device) {
  check(device, dtype);
  enabled_before_ = is_enabled(device);
  dtype_before_ = dtype_of(device);
  at::autocast::increment_nesting();
  set(device, enabled, dtype);
}

Autocast::~Autocast() {
  // The cache holds half-precision copies of weights: past the outermost scope they would be stale after the next update.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(device_, enabled_before_, dtype_before_);
}

HalfPrecision choose_half_precision(c10::Device device, c10::ScalarType dtype) {
  const char* name = dtype == c10::kHalf ? "fp16" : "bf16";
  if (device.is_cuda()) return {true, fmt::format("{}: computing in {} on {}, weights in fp32", name, name, device.str())};
  if (dtype == c10::kBFloat16 && cpu_computes_bf16() && at::hasMKLDNN()) {
    return {true, "bf16: the CPU has instructions for it: computing in bf16, weights in fp32"};
  }
  return {false, fmt::format("{}: this CPU has no instructions for it: computing in fp32, keeping activations in {}", name, name)};
}

}  // namespace headroom
