#include "ops/convert.h"

#include "core/parallel.h"
#include "ops/kernels.h"

#include <headroom/core/error.h>

#include <ATen/ATen.h>

#include <algorithm>

namespace headroom {
namespace {

constexpr std::int64_t kGrain = 65536;

thread_local std::optional<at::ScalarType> current_kept_type;

std::uint16_t* bits(const at::Tensor& t) { return static_cast<std::uint16_t*>(t.data_ptr()); }

template <class From, class To, class Kernel>
void run(const From* from, To* to, std::int64_t count, Kernel kernel) {
  parallel_for(0, count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernel(from + begin, to + begin, end - begin);
  });
}

// False when there is no kernel for the pair of types.
bool run_kernel(const at::Tensor& x, const at::Tensor& out) {
  const at::ScalarType from = x.scalar_type(), to = out.scalar_type();
  if (!x.is_cpu() || !out.is_cpu()) return false;
  if (from == at::kFloat && to == at::kBFloat16) {
    run(x.data_ptr<float>(), bits(out), x.numel(), kernels::float_to_bf16);
  } else if (from == at::kBFloat16 && to == at::kFloat) {
    run(bits(x), out.data_ptr<float>(), x.numel(), kernels::bf16_to_float);
  } else if (from == at::kFloat && to == at::kHalf) {
    run(x.data_ptr<float>(), bits(out), x.numel(), kernels::float_to_fp16);
  } else if (from == at::kHalf && to == at::kFloat) {
    run(bits(x), out.data_ptr<float>(), x.numel(), kernels::fp16_to_float);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void convert_out(const at::Tensor& x, const at::Tensor& out) {
  const at::NoGradGuard no_grad;
  if (x.sizes() != out.sizes() || !x.is_contiguous() || !out.is_contiguous()) {
    throw ConfigError("convert_out needs two contiguous tensors of one size");
  }
  if (!run_kernel(x, out)) at::Tensor(out).copy_(x);
}

at::Tensor convert(const at::Tensor& x, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const at::Tensor source = x.is_non_overlapping_and_dense() ? x.detach() : x.detach().contiguous();
  // Both have the same dense strides, so that memory order is element order.
  at::Tensor out = at::empty_strided(source.sizes(), source.strides(),
                                     source.options().dtype(type).requires_grad(false));
  if (!run_kernel(source, out)) out.copy_(source);
  return out;
}

void round_to(const at::Tensor& x, at::ScalarType type) {
  if (x.is_meta()) return;
  if (!x.is_contiguous() || !x.is_cpu())
    throw ConfigError("round_to needs contiguous floats on the CPU");
  constexpr std::int64_t kTile = 4096;  // stays in the first-level cache
  float* values = x.data_ptr<float>();
  const bool is_fp16 = type == at::kHalf;
  parallel_for(0, x.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::uint16_t half[kTile];
    for (std::int64_t first = begin; first < end; first += kTile) {
      const std::int64_t count = std::min(kTile, end - first);
      (is_fp16 ? kernels::float_to_fp16 : kernels::float_to_bf16)(values + first, half, count);
      (is_fp16 ? kernels::fp16_to_float : kernels::bf16_to_float)(half, values + first, count);
    }
  });
}

KeptTypeScope::KeptTypeScope(std::optional<at::ScalarType> type) : before_(current_kept_type) {
  current_kept_type = type;
}
KeptTypeScope::~KeptTypeScope() { current_kept_type = before_; }
std::optional<at::ScalarType> kept_type() { return current_kept_type; }

}  // namespace headroom
