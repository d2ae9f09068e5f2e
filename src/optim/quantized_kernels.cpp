#include "optim/quantized_kernels.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/quantized_kernels.cpp"
#include <hwy/foreach_target.h>  // compiles this file once per target
#include <hwy/highway.h>

#include "optim/vector_loop-inl.h"

// The codes. With y = code + 1 = 2^k * m, 1 <= m < 2, a code of K bits stands for the fraction 4^(k - K) * (3 m - 2) of the block's
// scale: piecewise linear between the powers of 4, exactly 1 for the largest code. Code 0 is 0. Both directions are a few integer
// operations on the bits of floats, which is why there is no table.

HWY_BEFORE_NAMESPACE();
namespace headroom::optim_kernels::HWY_NAMESPACE {

using DI = hn::RebindToSigned<D>;
using VI = hn::Vec<DI>;
using DU = hn::RebindToUnsigned<D>;
using DB = hn::Rebind<std::uint8_t, D>;

constexpr int kExponentBias = 127;
constexpr int kMantissaBits = 23;
constexpr int kRootBits = 8;
constexpr int kMagnitudeBits = 7;  // of the first moment, beside its sign

HWY_INLINE V power_of_two(VI exponent_field) { return hn::BitCast(D(), hn::ShiftLeft<kMantissaBits>(exponent_field)); }

template <int kBits>
HWY_INLINE V decode(VI code) {
  const D d;
  const DI di;
  const V y = hn::ConvertTo(d, hn::Add(code, hn::Set(di, 1)));
  const VI exponent = hn::ShiftRight<kMantissaBits>(hn::BitCast(di, y));  // k + bias
  const V a = power_of_two(hn::Sub(exponent, hn::Set(di, 2 * kBits)));
  const V b = power_of_two(hn::Sub(hn::Add(exponent, exponent), hn::Set(di, kExponentBias + 2 * kBits - 1)));
  const V value = hn::MulSub(hn::Mul(y, hn::Set(d, 3.0f)), a, b);
  return hn::IfThenElseZero(hn::RebindMask(d, hn::Gt(code, hn::Zero(di))), value);
}

/// The code of a fraction 0 <= x <= 1, rounded up where its distance to the code below is above 1 - round_up (of one step).
template <int kBits>
HWY_INLINE VI encode(V x, V round_up) {
  const D d;
  const DI di;
  const VI exponent = hn::Sub(hn::ShiftRight<kMantissaBits>(hn::BitCast(di, x)), hn::Set(di, kExponentBias));
  const VI exponent4 = hn::Max(hn::ShiftRight<1>(exponent), hn::Set(di, -kBits));
  const V a = power_of_two(hn::Sub(hn::Set(di, kExponentBias + kBits), exponent4));
  const V b = power_of_two(hn::Add(hn::Set(di, kExponentBias + kBits + 1), exponent4));
  const V y = hn::MulAdd(hn::MulAdd(x, a, b), hn::Set(d, 1.0f / 3.0f), round_up);
  const VI code = hn::Sub(hn::ConvertTo(di, y), hn::Set(di, 1));
  return hn::Min(hn::Max(code, hn::Zero(di)), hn::Set(di, (1 << kBits) - 1));
}

HWY_INLINE VI load_codes(const std::uint8_t* codes) { return hn::PromoteTo(DI(), hn::LoadU(DB(), codes)); }
HWY_INLINE void store_codes(VI codes, std::uint8_t* to) { hn::StoreU(hn::DemoteTo(DB(), codes), DB(), to); }

HWY_INLINE V decode_signed(VI code) {
  const DI di;
  const VI sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(di, 1 << kMagnitudeBits)));
  const V magnitude = decode<kMagnitudeBits>(hn::And(code, hn::Set(di, (1 << kMagnitudeBits) - 1)));
  return hn::Or(magnitude, hn::BitCast(D(), sign));
}

HWY_INLINE VI encode_signed(V fraction) {
  const D d;
  const DI di;
  const VI magnitude = encode<kMagnitudeBits>(hn::Abs(fraction), hn::Set(d, 0.5f));
  const VI negative = hn::And(hn::ShiftRight<24>(hn::BitCast(di, fraction)), hn::Set(di, 1 << kMagnitudeBits));
  return hn::Or(magnitude, negative);
}

/// A root that is not 0 never gets code 0: dividing by eps alone would make a wild step of a small first moment.
HWY_INLINE VI encode_root(V fraction, V round_up) {
  const DI di;
  const VI code = encode<kRootBits>(fraction, round_up);
  const auto positive = hn::RebindMask(di, hn::Gt(fraction, hn::Zero(D())));
  return hn::Max(code, hn::IfThenElseZero(positive, hn::Set(di, 1)));
}

/// Which way elements are rounded: an equidistributed sequence over the steps for each element, at another phase for each.
class Dither {
 public:
  HWY_INLINE Dither(std::uint32_t step_index, std::int64_t first) {
    constexpr std::uint32_t kPerStep = 0x9E3779B9U;
    constexpr std::uint32_t kPerElement = 0xC2B2AE3DU;
    const DU du;
    const auto start = step_index * kPerStep + static_cast<std::uint32_t>(first) * kPerElement;
    phase_ = hn::Add(hn::Set(du, start), hn::Mul(hn::Iota(du, 0), hn::Set(du, kPerElement)));
    advance_ = hn::Set(du, static_cast<std::uint32_t>(hn::Lanes(du)) * kPerElement);
  }

  /// The next vector of numbers in [0, 1). The smallest are lifted a little, so that a value on a code keeps it in spite of rounding.
  HWY_INLINE V next() {
    const V unit = hn::Mul(hn::ConvertTo(D(), hn::BitCast(DI(), hn::ShiftRight<8>(phase_))), hn::Set(D(), 1.0f / (1 << 24)));
    phase_ = hn::Add(phase_, advance_);
    return hn::Max(unit, hn::Set(D(), 1e-4f));
  }

 private:
  hn::Vec<DU> phase_;
  hn::Vec<DU> advance_;
};

struct Block {
  float* parameter;
  const float* gradient;
  std::uint8_t* exp_avg_codes;
  float* exp_avg_scale;
  std::uint8_t* root_sq_codes;
  float* root_sq_scale;
};

HWY_INLINE V reciprocal_or_zero(V largest) {
  const D d;
  return hn::IfThenElseZero(hn::Gt(largest, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), largest));
}

HWY_INLINE void update_block(const AdamStep& step, Dither dither, const Block& block) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  HWY_ALIGN float exp_avg[kQuantizedBlock];
  HWY_ALIGN float root_sq[kQuantizedBlock];
  const V old_avg_scale = hn::Set(d, *block.exp_avg_scale);
  const V old_root_scale = hn::Set(d, *block.root_sq_scale);
  V largest_avg = hn::Zero(d);
  V largest_root = hn::Zero(d);
  for (std::size_t i = 0; i < kQuantizedBlock; i += lanes) {
    const V p = hn::LoadU(d, block.parameter + i);
    const V g = hn::LoadU(d, block.gradient + i);
    const V old_avg = hn::Mul(decode_signed(load_codes(block.exp_avg_codes + i)), old_avg_scale);
    const V old_root = hn::Mul(decode<kRootBits>(load_codes(block.root_sq_codes + i)), old_root_scale);
    const V m = hn::MulAdd(hn::Set(d, step.beta1), old_avg, hn::Mul(hn::Set(d, step.one_minus_beta1), g));
    const V v = hn::MulAdd(hn::Set(d, step.beta2), hn::Mul(old_root, old_root), hn::Mul(hn::Set(d, step.one_minus_beta2), hn::Mul(g, g)));
    const V root = hn::Sqrt(v);
    const V denominator = hn::MulAdd(root, hn::Set(d, step.inv_root_bias2), hn::Set(d, step.eps));
    const V shrunk = hn::Mul(p, hn::Set(d, step.shrink));
    hn::StoreU(hn::NegMulAdd(hn::Set(d, step.step_size), hn::Div(m, denominator), shrunk), d, block.parameter + i);
    hn::Store(m, d, exp_avg + i);
    hn::Store(root, d, root_sq + i);
    largest_avg = hn::Max(largest_avg, hn::Abs(m));
    largest_root = hn::Max(largest_root, root);
  }
  largest_avg = hn::MaxOfLanes(d, largest_avg);
  largest_root = hn::MaxOfLanes(d, largest_root);
  *block.exp_avg_scale = hn::GetLane(largest_avg);
  *block.root_sq_scale = hn::GetLane(largest_root);
  const V to_avg_fraction = reciprocal_or_zero(largest_avg);
  const V to_root_fraction = reciprocal_or_zero(largest_root);
  for (std::size_t i = 0; i < kQuantizedBlock; i += lanes) {
    store_codes(encode_signed(hn::Mul(hn::Load(d, exp_avg + i), to_avg_fraction)), block.exp_avg_codes + i);
    store_codes(encode_root(hn::Mul(hn::Load(d, root_sq + i), to_root_fraction), dither.next()), block.root_sq_codes + i);
  }
}

/// The last block of a tensor whose size is not a multiple: padded with zeros, which stay zero and are no maximum.
void update_partial_block(const AdamStep& step, const Dither& dither, const Block& block, std::size_t count) {
  HWY_ALIGN float parameter[kQuantizedBlock] = {};
  HWY_ALIGN float gradient[kQuantizedBlock] = {};
  HWY_ALIGN std::uint8_t exp_avg_codes[kQuantizedBlock] = {};
  HWY_ALIGN std::uint8_t root_sq_codes[kQuantizedBlock] = {};
  std::copy_n(block.parameter, count, parameter);
  std::copy_n(block.gradient, count, gradient);
  std::copy_n(block.exp_avg_codes, count, exp_avg_codes);
  std::copy_n(block.root_sq_codes, count, root_sq_codes);
  update_block(step, dither, {parameter, gradient, exp_avg_codes, block.exp_avg_scale, root_sq_codes, block.root_sq_scale});
  std::copy_n(parameter, count, block.parameter);
  std::copy_n(exp_avg_codes, count, block.exp_avg_codes);
  std::copy_n(root_sq_codes, count, block.root_sq_codes);
}

void AdamW8bitUpdate(const AdamStep& step, std::uint32_t step_index, std::int64_t first, std::int64_t count, float* parameter,
                     const float* gradient, const QuantizedMoments& moments) {
  for (std::int64_t i = first; i < first + count; i += kQuantizedBlock) {
    const std::int64_t index = i / kQuantizedBlock;
    const Dither dither(step_index, i);
    const Block block{parameter + i,
                      gradient + i,
                      moments.exp_avg_codes + i,
                      moments.exp_avg_scales + index,
                      moments.root_sq_codes + i,
                      moments.root_sq_scales + index};
    if (i + kQuantizedBlock <= first + count) {
      update_block(step, dither, block);
    } else {
      update_partial_block(step, dither, block, static_cast<std::size_t>(first + count - i));
    }
  }
}

}  // namespace headroom::optim_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::optim_kernels {
HWY_EXPORT(AdamW8bitUpdate);

void adamw_8bit_update(const AdamStep& step, std::uint32_t step_index, std::int64_t first, std::int64_t count, float* parameter,
                       const float* gradient, const QuantizedMoments& moments) {
  HWY_DYNAMIC_DISPATCH(AdamW8bitUpdate)(step, step_index, first, count, parameter, gradient, moments);
}
}  // namespace headroom::optim_kernels
#endif
