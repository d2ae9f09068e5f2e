#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/convert_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

// Calls vector(from, to) for whole vectors, and once for the rest through buffers.
template <class From, class To, class Body>
HWY_INLINE void ForEachVector(const From* from, To* to, std::int64_t count, Body&& body) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes) body(from + k, to + k);
  if (k < count) {
    HWY_ALIGN From in[16] = {};
    HWY_ALIGN To out[16];
    std::memcpy(in, from + k, static_cast<std::size_t>(count - k) * sizeof(From));
    body(in, out);
    std::memcpy(to + k, out, static_cast<std::size_t>(count - k) * sizeof(To));
  }
}

void FloatToBf16(const float* from, std::uint16_t* to, std::int64_t count) {
  const DF d;
  ForEachVector(from, to, count, [&](const float* in, std::uint16_t* out) HWY_ATTR {
    StoreVector(hn::LoadU(d, in), d, reinterpret_cast<Bf16*>(out));
  });
}

void Bf16ToFloat(const std::uint16_t* from, float* to, std::int64_t count) {
  const DF d;
  ForEachVector(from, to, count, [&](const std::uint16_t* in, float* out) HWY_ATTR {
    hn::StoreU(LoadVector(d, reinterpret_cast<const Bf16*>(in)), d, out);
  });
}

void FloatToFp16(const float* from, std::uint16_t* to, std::int64_t count) {
  const DF d;
  const DU du;
  const D16 d16;
  ForEachVector(from, to, count, [&](const float* in, std::uint16_t* out) HWY_ATTR {
    const VU all = hn::BitCast(du, hn::LoadU(d, in));
    const VU sign = hn::And(all, hn::Set(du, 0x80000000u));
    const VU magnitude = hn::Xor(all, sign);
    // Normal results: move the exponent's bias from 127 to 15, rounding as for bf16 but at bit 13.
    const VU odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const VU shifted = hn::Sub(magnitude, hn::Set(du, (127u - 15u) << 23));
    const VU normal = hn::ShiftRight<13>(hn::Add(hn::Add(shifted, hn::Set(du, 0xFFFu)), odd));
    // Results below 2^-14 are denormal: adding 1/2 aligns their last bit with the last bit of a
    // float, which rounds.
    const VF half = hn::Set(d, 0.5f);
    const VU denormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
    const VU infinity = hn::Set(du, 0x7C00u);
    const VU nan =
        hn::Or(hn::Set(du, 0x7E00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x1FFu)));
    const DI di;
    const auto less = [&](VU a, std::uint32_t b) HWY_ATTR {  // both below 2^31
      return hn::RebindMask(du,
                            hn::Lt(hn::BitCast(di, a), hn::Set(di, static_cast<std::int32_t>(b))));
    };
    VU result = hn::IfThenElse(less(magnitude, 0x38800000u), denormal, normal);  // 2^-14
    result =
        hn::IfThenElse(less(magnitude, 0x477FF000u), result, infinity);  // 65520 rounds to infinity
    result = hn::IfThenElse(less(magnitude, 0x7F800001u), result, nan);
    hn::StoreU(hn::TruncateTo(d16, hn::Or(result, hn::ShiftRight<16>(sign))), d16, out);
  });
}

void Fp16ToFloat(const std::uint16_t* from, float* to, std::int64_t count) {
  const DF d;
  const DU du;
  const DI di;
  const D16 d16;
  ForEachVector(from, to, count, [&](const std::uint16_t* in, float* out) HWY_ATTR {
    const VU all = hn::PromoteTo(du, hn::LoadU(d16, in));
    const VU sign = hn::ShiftLeft<16>(hn::And(all, hn::Set(du, 0x8000u)));
    const VU magnitude = hn::And(all, hn::Set(du, 0x7FFFu));
    const VU shifted = hn::ShiftLeft<13>(magnitude);
    const VU normal = hn::Add(shifted, hn::Set(du, (127u - 15u) << 23));
    // Infinity and NaN have the largest exponent in both formats.
    const VU special = hn::Add(shifted, hn::Set(du, (255u - 31u) << 23));
    // A denormal is its bits times 2^-24.
    const VU denormal = hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)),
                                                hn::Set(d, 5.9604644775390625e-8f)));
    const auto less = [&](std::uint32_t b) HWY_ATTR {
      return hn::RebindMask(
          du, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<std::int32_t>(b))));
    };
    VU result = hn::IfThenElse(less(0x7C00u), normal, special);
    result = hn::IfThenElse(less(0x0400u), denormal, result);
    hn::StoreU(hn::BitCast(d, hn::Or(result, sign)), d, out);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(FloatToBf16);
HWY_EXPORT(Bf16ToFloat);
HWY_EXPORT(FloatToFp16);
HWY_EXPORT(Fp16ToFloat);

namespace kernels {

void float_to_bf16(const float* from, std::uint16_t* to, std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(FloatToBf16)(from, to, count);
}
void bf16_to_float(const std::uint16_t* from, float* to, std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(Bf16ToFloat)(from, to, count);
}
void float_to_fp16(const float* from, std::uint16_t* to, std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(FloatToFp16)(from, to, count);
}
void fp16_to_float(const std::uint16_t* from, float* to, std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(Fp16ToFloat)(from, to, count);
}

}  // namespace kernels
}  // namespace headroom
#endif
