#include <headroom/execute/autocast.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <headroom/core/error.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include "core/blas_kernels.h"
#include "core/figures.h"
#include "core/torch_compat.h"
#include "ops/half_product.h"

namespace headroom {
namespace {

// Where the CPU has AMX, oneDNN's products in bf16 were seen to end the program by an illegal
// instruction, in LibTorch 1.13 (at `tilezero`, although the system had given its permission) and
// in 2.6; with this limit they do not. oneDNN reads it at its first product, so it is set while the
// program is loaded, unless the user has decided.
const bool kOneDnnIsLimited = []() {
  return may_tune_libraries() &&
         setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0) == 0;
}();

// Whether a product in bf16 can be tried without ending the program.
bool products_are_safe() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  const bool allows_amx = limit == nullptr || std::string(limit).find("AMX") != std::string::npos ||
                          std::string(limit) == "ALL" || std::string(limit) == "DEFAULT";
  return !half_instructions().amx_bf16 || !allows_amx;
}

// Buffers of the probe are no tensors of the run: they are outside of the meter, and whatever the
// products themselves allocate must not depend on how much of the budget is left, or two budgets
// could decide differently.
class NoCap {
 public:
  NoCap() : cap_(MemoryMeter::instance().cap()) { MemoryMeter::instance().set_cap(0); }
  ~NoCap() { MemoryMeter::instance().set_cap(cap_); }
  NoCap(const NoCap&) = delete;
  NoCap& operator=(const NoCap&) = delete;

 private:
  std::int64_t cap_;
};

// The time of a product in bf16 as a multiple of the time in fp32, the fastest of a few of each,
// interleaved.
double bf16_product_time() {
  constexpr std::int64_t kRows = 1024, kWidth = 512;
  constexpr int kRuns = 5;
  const NoCap no_cap;
  const at::NoGradGuard no_grad;
  std::vector<float> x(kRows * kWidth, 0.5F), y(kRows * kRows);
  std::vector<c10::BFloat16> x_half(x.size(), c10::BFloat16(0.5F)), y_half(y.size());
  const auto matrix = [](void* data, std::int64_t columns, c10::ScalarType type) {
    return at::from_blob(data, {kRows, columns}, type);
  };
  const auto seconds = [](const at::Tensor& in, at::Tensor out) {
    const auto start = std::chrono::steady_clock::now();
    at::mm_out(out, in, in.t());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double full = std::numeric_limits<double>::infinity(), half = full;
  for (int run = 0; run < kRuns; ++run) {
    full = std::min(
        full, seconds(matrix(x.data(), kWidth, c10::kFloat), matrix(y.data(), kRows, c10::kFloat)));
    half = std::min(half, seconds(matrix(x_half.data(), kWidth, c10::kBFloat16),
                                  matrix(y_half.data(), kRows, c10::kBFloat16)));
  }
  return half / full;
}

HalfPrecision ask_cpu_for_bf16() {
  const auto keep = [](const std::string& why) {
    return HalfPrecision{
        false, fmt::format("bf16: {}: computing in fp32, keeping activations in bf16", why)};
  };
  // Casting takes time as well, and a decision at the edge would differ from run to run.
  constexpr double kClearlyFaster = 0.75;
  if (!half_instructions().avx512_bf16 && !half_instructions().amx_bf16)
    return keep("this CPU has no instructions for it");
  if (!at::hasMKLDNN())
    return keep("this LibTorch has no products that use the CPU's instructions for it");
  if (!products_are_safe())
    return keep("ONEDNN_MAX_CPU_ISA lets this LibTorch use AMX, which it does wrongly");
  if (!ops::has_fast_half_products())
    return keep("this build has no oneDNN that uses the CPU's instructions for it");
  const double time = bf16_product_time();
  if (time > kClearlyFaster)
    return keep(fmt::format("a product takes {} times as long as in fp32 on this CPU",
                            format_figure(time)));
  return {true, fmt::format("bf16: a product takes {} times as long as in fp32: computing in "
                            "bf16 and keeping activations in it, weights in fp32",
                            format_figure(time))};
}

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
    throw ConfigError(fmt::format("autocast is for cpu and cuda, not {}",
                                  c10::DeviceTypeName(device, /*lower_case=*/true)));
  }
  if (dtype == c10::kBFloat16 || (dtype == c10::kHalf && device == c10::kCUDA)) return;
  throw ConfigError(fmt::format("autocast on {} does not compute in {}; choose bf16{}",
                                c10::DeviceTypeName(device, /*lower_case=*/true),
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
  // The cache holds half-precision copies of weights: past the outermost scope they would be stale
  // after the next update.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(device_, enabled_before_, dtype_before_);
}

HalfPrecision choose_half_precision(c10::Device device, c10::ScalarType dtype) {
  const char* name = dtype == c10::kHalf ? "fp16" : "bf16";
  if (device.is_cuda())
    return {true,
            fmt::format("{}: computing in {} on {}, weights in fp32", name, name, device.str())};
  if (dtype == c10::kHalf)
    return {false,
            "fp16: on a CPU autocast is for bf16 alone: computing in fp32, keeping activations in "
            "fp16"};
  static const HalfPrecision bf16 = ask_cpu_for_bf16();
  return bf16;
}

}  // namespace headroom
