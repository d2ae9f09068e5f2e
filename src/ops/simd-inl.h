// Vector words shared by the kernel files. Highway compiles it once per target, hence the guard of
// its own.

#if defined(HEADROOM_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_OPS_SIMD_INL_H_
#undef HEADROOM_OPS_SIMD_INL_H_
#else
#define HEADROOM_OPS_SIMD_INL_H_
#endif

#include "ops/kernels.h"

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that scratch sizes do not depend on the target.
using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;

using D16 = hn::Rebind<std::uint16_t, DU>;
using kernels::Bf16;

HWY_INLINE VF LoadVector(DF d, const float* p) { return hn::LoadU(d, p); }
HWY_INLINE VF LoadVector(DF d, const Bf16* p) {
  const auto bits = hn::LoadU(D16(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
}

HWY_INLINE void StoreVector(VF v, DF d, float* p) { hn::StoreU(v, d, p); }
// Rounds to nearest even.
HWY_INLINE void StoreVector(VF v, DF, Bf16* p) {
  const DU du;
  const VU bits = hn::BitCast(du, v);
  // Adding 0x7FFF, and 1 more when the kept part is odd, carries exactly when rounding to nearest
  // even goes up.
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const VU rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
  // A NaN keeps its sign and becomes quiet: rounding could have carried it into infinity.
  const VU quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  hn::StoreU(hn::TruncateTo(D16(), hn::IfThenElse(is_nan, quiet, rounded)), D16(),
             reinterpret_cast<std::uint16_t*>(p));
}

// Tails go through a small buffer: a masked load may touch memory beyond the end on targets without
// masks.
template <class T>
HWY_INLINE VF LoadPart(DF d, const T* p, std::int64_t count) {
  HWY_ALIGN T buffer[16] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(count) * sizeof(T));
  return LoadVector(d, buffer);
}

template <class T>
HWY_INLINE void StorePart(VF v, DF d, T* p, std::int64_t count) {
  HWY_ALIGN T buffer[16];
  StoreVector(v, d, buffer);
  std::memcpy(p, buffer, static_cast<std::size_t>(count) * sizeof(T));
}

// Loads and stores whole vectors of a row, or the part of one at its end; floats or bf16.
struct LoadWhole {
  template <class T>
  HWY_INLINE VF operator()(const T* p) const {
    return LoadVector(DF(), p);
  }
};
struct StoreWhole {
  template <class T>
  HWY_INLINE void operator()(VF v, T* p) const {
    StoreVector(v, DF(), p);
  }
};
struct LoadRest {
  template <class T>
  HWY_INLINE VF operator()(const T* p) const {
    return LoadPart(DF(), p, count);
  }
  std::int64_t count;
};
struct StoreRest {
  template <class T>
  HWY_INLINE void operator()(VF v, T* p) const {
    StorePart(v, DF(), p, count);
  }
  std::int64_t count;
};

// Calls body(column, load, store) for every vector of a row; the last one may be partial.
template <class Body>
HWY_INLINE void ForEachVector(std::int64_t width, Body&& body) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  std::int64_t j = 0;
  for (; j + lanes <= width; j += lanes) body(j, LoadWhole(), StoreWhole());
  if (j < width) body(j, LoadRest{width - j}, StoreRest{width - j});
}

HWY_INLINE float Sum(DF d, VF v) { return hn::GetLane(hn::SumOfLanes(d, v)); }
HWY_INLINE float Largest(DF d, VF v) { return hn::GetLane(hn::MaxOfLanes(d, v)); }

// e^x for x <= 88, to about one unit in the last place; 0 below -87, so that no denormal number
// slows what follows. NaN stays NaN.
HWY_INLINE VF Exp(DF d, VF x) {
  const DI di;
  const VF n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  VF p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
  const auto exponent = hn::ShiftLeft<23>(hn::NearestInt(n));
  const VF scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), scaled);
}

// Cumulative normal distribution and its derivative-related factor: gelu(x) = x * cdf, gelu'(x) =
// cdf + x * slope.
HWY_INLINE void GeluExactParts(DF d, VF x, VF& cdf, VF& slope) {
  // Abramowitz and Stegun 7.1.26: its exponential is the density's too. Absolute error below 2e-7.
  const VF one = hn::Set(d, 1.0f);
  const VF z = hn::Mul(hn::Abs(x), hn::Set(d, 0.70710678118654752f));
  const VF e = Exp(d, hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f)));
  const VF t = hn::Div(one, hn::MulAdd(z, hn::Set(d, 0.3275911f), one));
  VF p = hn::Set(d, 1.061405429f);
  p = hn::MulAdd(p, t, hn::Set(d, -1.453152027f));
  p = hn::MulAdd(p, t, hn::Set(d, 1.421413741f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.284496736f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.254829592f));
  const VF half_erfc = hn::Mul(hn::Mul(hn::Set(d, 0.5f), hn::Mul(p, t)), e);
  cdf = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), half_erfc, hn::Sub(one, half_erfc));
  slope = hn::Mul(e, hn::Set(d, 0.3989422804014327f));
}

HWY_INLINE void GeluTanhParts(DF d, VF x, VF& cdf, VF& slope) {
  // 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)) with u = k (x + 0.044715 x^3).
  const VF one = hn::Set(d, 1.0f);
  const VF square = hn::Mul(x, x);
  const VF k2 = hn::Set(d, 2.0f * 0.7978845608028654f);
  const VF two_u = hn::Mul(hn::Mul(k2, x), hn::MulAdd(square, hn::Set(d, 0.044715f), one));
  const VF e = Exp(d, hn::Min(hn::Set(d, 80.0f), hn::Neg(two_u)));
  cdf = hn::Div(one, hn::Add(one, e));
  const VF du = hn::Mul(k2, hn::MulAdd(square, hn::Set(d, 3.0f * 0.044715f), one));
  slope = hn::Mul(hn::Mul(cdf, hn::Sub(one, cdf)), du);
}

HWY_INLINE void GeluQuickParts(DF d, VF x, VF& cdf, VF& slope) {
  const VF one = hn::Set(d, 1.0f), k = hn::Set(d, 1.702f);
  const VF e = Exp(d, hn::Min(hn::Set(d, 80.0f), hn::Neg(hn::Mul(k, x))));
  cdf = hn::Div(one, hn::Add(one, e));
  // 1 - cdf = e cdf, without the cancellation where cdf is near 1.
  slope = hn::Mul(k, hn::Mul(cdf, hn::Mul(e, cdf)));
}

// Random bits of element `column` of the row whose keys are given: the same on every target and for
// every order of work.
HWY_INLINE VU RandomBits(DU d, std::uint32_t key0, std::uint32_t key1, std::uint32_t column) {
  VU x = hn::Add(hn::Mul(hn::Iota(d, column), hn::Set(d, 0x9E3779B9u)), hn::Set(d, key0));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Xor(hn::Mul(x, hn::Set(d, 0x7FEB352Du)), hn::Set(d, key1));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(d, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// `scale` where the element is kept and 0 where it is dropped; an element is kept when its bits
// reach `threshold`.
HWY_INLINE VF KeepFactor(DF d, std::uint32_t key0, std::uint32_t key1, std::uint32_t column,
                         std::uint32_t threshold, VF scale) {
  const DU du;
  const DI di;
  // Unsigned comparison by flipping the sign bit, since every target has the signed one.
  const auto flip = hn::Set(di, static_cast<std::int32_t>(0x80000000u));
  const auto bits = hn::Xor(hn::BitCast(di, RandomBits(du, key0, key1, column)), flip);
  const auto bound = hn::Xor(hn::Set(di, static_cast<std::int32_t>(threshold)), flip);
  return hn::IfThenZeroElse(hn::RebindMask(d, hn::Lt(bits, bound)), scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_OPS_SIMD_INL_H_
