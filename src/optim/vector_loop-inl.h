// Part of the kernels of this layer, included once per Highway target: there is no include guard in
// the ordinary sense.
#if defined(HEADROOM_OPTIM_VECTOR_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_OPTIM_VECTOR_LOOP_INL_H_
#undef HEADROOM_OPTIM_VECTOR_LOOP_INL_H_
#else
#define HEADROOM_OPTIM_VECTOR_LOOP_INL_H_
#endif

#include <hwy/highway.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace headroom::optim_kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

template <std::size_t kNumArrays>
using Pointers = std::array<float*, kNumArrays>;

/// Calls body(pointers) for one whole vector of each array after the other. The last, partial
/// vector goes through a zeroed buffer, so that every element is computed by the same instructions.
/// Only the first `kNumWritten` arrays are ever written.
template <std::size_t kNumWritten, std::size_t kNumArrays, typename Body>
HWY_INLINE void for_each_vector(std::int64_t count, const Pointers<kNumArrays>& arrays,
                                Body& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
  Pointers<kNumArrays> at = arrays;
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    body(at);
    for (float*& pointer : at) pointer += lanes;
  }
  if (i == count) return;
  const auto rest_bytes = static_cast<std::size_t>(count - i) * sizeof(float);
  HWY_ALIGN float buffer[kNumArrays][hn::MaxLanes(D())] = {};
  Pointers<kNumArrays> buffered;
  for (std::size_t k = 0; k < kNumArrays; ++k) {
    std::memcpy(buffer[k], at[k], rest_bytes);
    buffered[k] = buffer[k];
  }
  body(buffered);
  for (std::size_t k = 0; k < kNumWritten; ++k) std::memcpy(at[k], buffer[k], rest_bytes);
}

}  // namespace headroom::optim_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
