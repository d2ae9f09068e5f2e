#include "optim/quantized_kernels.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/quantized_kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles this file once per target
#include <hwy/highway.h>

#include "optim/vector_loop-inl.h"

// The codes are quadratic. A code c of the first moment, -127 to 127, stands for the fraction (c /
// 127)^2 of the block's scale, with c's sign; a code of the second moment's root, 0 to 255, for ((c
// + 1) / 256)^2. So the largest magnitude of a block is exact, steps are fine near it, and values 4
// decades smaller are still told apart. Both directions are a few instructions: there is no table
// to look up. A root is never 0, because dividing by eps alone would make a wild step of a small
// first moment.

HWY_BEFORE_NAMESPACE();
namespace headroom::optim_kernels::HWY_NAMESPACE {

using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using DS8 = hn::Rebind<std::int8_t, D>;
using DU8 = hn::Rebind<std::uint8_t, D>;

constexpr float kAverageCodes = 127;
constexpr float kRootCodes = 256;
constexpr float kTiny = 1e-37f;  // keeps the reciprocal root of 0 finite

// The work on a block is long enough for the processor's own prefetching to fall behind.
constexpr std::size_t kPrefetchAhead = 4 * kQuantizedBlock;
constexpr std::size_t kCacheLine = 64;

/// Added to a number below 2^22 in magnitude, it leaves the nearest integer in the lowest bits.
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23

/// What a code is multiplied by before it is squared.
HWY_INLINE V decode_factor(float scale, float num_codes) {
  const D d;
  return hn::Mul(hn::Sqrt(hn::Set(d, scale)), hn::Set(d, 1.0f / num_codes));
}
/// What the root of a value is multiplied by to make its code.
HWY_INLINE V encode_factor(V scale, float num_codes) {
  const D d;
  return hn::IfThenElseZero(hn::Gt(scale, hn::Zero(d)),
                            hn::Div(hn::Set(d, num_codes), hn::Sqrt(scale)));
}

HWY_INLINE void store_lowest_bytes(V integers, std::uint8_t* to) {
  hn::StoreU(hn::TruncateTo(DU8(), hn::BitCast(DU(), integers)), DU8(), to);
}

HWY_INLINE V load_average(const std::int8_t* codes, V factor) {
  const V root = hn::Mul(hn::ConvertTo(D(), hn::PromoteTo(DI(), hn::LoadU(DS8(), codes))), factor);
  return hn::Mul(root, hn::Abs(root));
}

/// The second moment itself: the stored value is its root.
HWY_INLINE V load_square(const std::uint8_t* codes, V factor) {
  const V fourth_root =
      hn::MulAdd(hn::ConvertTo(D(), hn::PromoteTo(DI(), hn::LoadU(DU8(), codes))), factor, factor);
  const V root = hn::Mul(fourth_root, fourth_root);
  return hn::Mul(root, root);
}

/// The square root of a value that is not negative, by an approximation and a Newton step: good to
/// the last bits, at a fraction of the time. Below kTiny it is too small, by less than kTiny's
/// root.
HWY_INLINE V fast_root(V value) {
  const D d;
  const V guess = hn::ApproximateReciprocalSqrt(hn::Max(value, hn::Set(d, kTiny)));
  const V root = hn::Mul(value, guess);
  return hn::Mul(root, hn::NegMulAdd(hn::Mul(root, guess), hn::Set(d, 0.5f), hn::Set(d, 1.5f)));
}

/// numerator / denominator in the same way.
HWY_INLINE V fast_quotient(V numerator, V denominator) {
  const D d;
  const V guess = hn::ApproximateReciprocal(denominator);
  return hn::Mul(numerator, hn::Mul(guess, hn::NegMulAdd(guess, denominator, hn::Set(d, 2.0f))));
}

/// Which way elements are rounded: an equidistributed sequence over the steps for each element, at
/// another phase for each.
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

  /// What to add to the next vector before it is rounded to the nearest: up to half a step. The
  /// last thousandth is left out, so that a value which is a code up to a rounding error keeps it.
  HWY_INLINE V next() {
    constexpr float kReach = 0.999f;
    const V from_1_to_2 =
        hn::BitCast(D(), hn::Or(hn::ShiftRight<9>(phase_), hn::Set(DU(), 0x3F800000U)));
    phase_ = hn::Add(phase_, advance_);
    return hn::MulAdd(from_1_to_2, hn::Set(D(), kReach), hn::Set(D(), -1.5f * kReach));
  }

 private:
  hn::Vec<DU> phase_;
  hn::Vec<DU> advance_;
};

/// Between the codes 0 and 1 the square of the fraction decides how often it is rounded up: tiny
/// values keep their size on average.
HWY_INLINE void store_average(V value, V factor, V dither, std::int8_t* codes) {
  const D d;
  const V signed_root =
      hn::Mul(value, hn::ApproximateReciprocalSqrt(hn::Max(hn::Abs(value), hn::Set(d, kTiny))));
  const V exact = hn::Mul(signed_root, factor);
  const V code = hn::MulAdd(exact, hn::Min(hn::Abs(exact), hn::Set(d, 1.0f)), dither);
  const V limited = hn::Max(hn::Min(code, hn::Set(d, kAverageCodes)), hn::Set(d, -kAverageCodes));
  store_lowest_bytes(hn::Add(limited, hn::Set(d, kToInteger)),
                     reinterpret_cast<std::uint8_t*>(codes));
}

HWY_INLINE void store_root(V value, V factor, V dither, std::uint8_t* codes) {
  const D d;
  const V code = hn::MulAdd(fast_root(value), factor, dither);
  const V limited = hn::Max(hn::Min(code, hn::Set(d, kRootCodes)), hn::Set(d, 1.0f));
  store_lowest_bytes(hn::Add(limited, hn::Set(d, kToInteger - 1.0f)), codes);
}

struct Block {
  float* parameter;
  const float* gradient;
  std::int8_t* exp_avg_codes;
  float* exp_avg_scale;
  std::uint8_t* root_sq_codes;
  float* root_sq_scale;
};

/// The numbers of a step in registers.
struct VectorStep {
  V shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_root_bias2, eps, step_size;
  explicit HWY_INLINE VectorStep(const AdamStep& step)
      : shrink(hn::Set(D(), step.shrink)),
        beta1(hn::Set(D(), step.beta1)),
        one_minus_beta1(hn::Set(D(), step.one_minus_beta1)),
        beta2(hn::Set(D(), step.beta2)),
        one_minus_beta2(hn::Set(D(), step.one_minus_beta2)),
        inv_root_bias2(hn::Set(D(), step.inv_root_bias2)),
        eps(hn::Set(D(), step.eps)),
        step_size(hn::Set(D(), step.step_size)) {}
};

/// New moments of a block that are still to be rounded, and how.
struct Unrounded {
  HWY_ALIGN float exp_avg[kQuantizedBlock];
  HWY_ALIGN float root_sq[kQuantizedBlock];
  float to_average_code, to_root_code;
};

HWY_INLINE void update_block(const VectorStep step, const Block& block, Unrounded& moments) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const V average_factor = decode_factor(*block.exp_avg_scale, kAverageCodes);
  const V root_factor = decode_factor(*block.root_sq_scale, kRootCodes);
  V largest_avg = hn::Zero(d);
  V largest_root = hn::Zero(d);
  for (std::size_t i = 0; i < kQuantizedBlock; i += kCacheLine) {
    hwy::Prefetch(block.exp_avg_codes + i + kPrefetchAhead);
    hwy::Prefetch(block.root_sq_codes + i + kPrefetchAhead);
  }
  for (std::size_t i = 0; i < kQuantizedBlock; i += lanes) {
    hwy::Prefetch(block.parameter + i + kPrefetchAhead);
    hwy::Prefetch(block.gradient + i + kPrefetchAhead);
    const V p = hn::LoadU(d, block.parameter + i);
    const V g = hn::LoadU(d, block.gradient + i);
    const V old_m = load_average(block.exp_avg_codes + i, average_factor);
    const V old_v = load_square(block.root_sq_codes + i, root_factor);
    const V m = hn::MulAdd(step.beta1, old_m, hn::Mul(step.one_minus_beta1, g));
    const V root =
        fast_root(hn::MulAdd(step.beta2, old_v, hn::Mul(step.one_minus_beta2, hn::Mul(g, g))));
    const V quotient = fast_quotient(m, hn::MulAdd(root, step.inv_root_bias2, step.eps));
    hn::StoreU(hn::NegMulAdd(step.step_size, quotient, hn::Mul(p, step.shrink)), d,
               block.parameter + i);
    hn::Store(m, d, moments.exp_avg + i);
    hn::Store(root, d, moments.root_sq + i);
    largest_avg = hn::Max(largest_avg, hn::Abs(m));
    largest_root = hn::Max(largest_root, root);
  }
  const V avg_scale = hn::MaxOfLanes(d, largest_avg);
  const V root_scale = hn::MaxOfLanes(d, largest_root);
  *block.exp_avg_scale = hn::GetLane(avg_scale);
  *block.root_sq_scale = hn::GetLane(root_scale);
  moments.to_average_code = hn::GetLane(encode_factor(avg_scale, kAverageCodes));
  moments.to_root_code = hn::GetLane(encode_factor(root_scale, kRootCodes));
}

HWY_INLINE void store_block(const Unrounded& moments, Dither dither, const Block& block) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const V to_average_code = hn::Set(d, moments.to_average_code);
  const V to_root_code = hn::Set(d, moments.to_root_code);
  for (std::size_t i = 0; i < kQuantizedBlock; i += lanes) {
    const V shift = dither.next();
    store_average(hn::Load(d, moments.exp_avg + i), to_average_code, shift,
                  block.exp_avg_codes + i);
    store_root(hn::Load(d, moments.root_sq + i), to_root_code, shift, block.root_sq_codes + i);
  }
}

/// The last block of a tensor whose size is not a multiple: padded with zeros, which stay zero and
/// are no maximum.
void update_partial_block(const VectorStep& step, const Dither& dither, const Block& block,
                          std::size_t count) {
  HWY_ALIGN float parameter[kQuantizedBlock] = {};
  HWY_ALIGN float gradient[kQuantizedBlock] = {};
  HWY_ALIGN std::int8_t exp_avg_codes[kQuantizedBlock] = {};
  HWY_ALIGN std::uint8_t root_sq_codes[kQuantizedBlock] = {};
  std::copy_n(block.parameter, count, parameter);
  std::copy_n(block.gradient, count, gradient);
  std::copy_n(block.exp_avg_codes, count, exp_avg_codes);
  std::copy_n(block.root_sq_codes, count, root_sq_codes);
  const Block padded{parameter,           gradient,      exp_avg_codes,
                     block.exp_avg_scale, root_sq_codes, block.root_sq_scale};
  Unrounded moments;
  update_block(step, padded, moments);
  store_block(moments, dither, padded);
  std::copy_n(parameter, count, block.parameter);
  std::copy_n(exp_avg_codes, count, block.exp_avg_codes);
  std::copy_n(root_sq_codes, count, block.root_sq_codes);
}

void AdamW8bitUpdate(const AdamStep& step, std::uint32_t step_index, std::int64_t first,
                     std::int64_t count, float* parameter, const float* gradient,
                     const QuantizedMoments& moments) {
  const VectorStep vector_step(step);
  const auto block_at = [&](std::int64_t i) {
    const std::int64_t index = i / kQuantizedBlock;
    return Block{parameter + i,
                 gradient + i,
                 moments.exp_avg_codes + i,
                 moments.exp_avg_scales + index,
                 moments.root_sq_codes + i,
                 moments.root_sq_scales + index};
  };
  // A block is rounded after the next one is updated: the processor need not wait for the scale of
  // a block that it has just seen.
  Unrounded unrounded[2];
  const std::int64_t whole_end = first + count / kQuantizedBlock * kQuantizedBlock;
  for (std::int64_t i = first; i < whole_end; i += kQuantizedBlock) {
    const std::int64_t parity = (i / kQuantizedBlock) % 2;
    update_block(vector_step, block_at(i), unrounded[parity]);
    const std::int64_t before = i - kQuantizedBlock;
    if (before >= first)
      store_block(unrounded[1 - parity], Dither(step_index, before), block_at(before));
  }
  const std::int64_t last = whole_end - kQuantizedBlock;
  if (last >= first)
    store_block(unrounded[(last / kQuantizedBlock) % 2], Dither(step_index, last), block_at(last));
  if (whole_end < first + count) {
    update_partial_block(vector_step, Dither(step_index, whole_end), block_at(whole_end),
                         static_cast<std::size_t>(first + count - whole_end));
  }
}

}  // namespace headroom::optim_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::optim_kernels {
HWY_EXPORT(AdamW8bitUpdate);

void adamw_8bit_update(const AdamStep& step, std::uint32_t step_index, std::int64_t first,
                       std::int64_t count, float* parameter, const float* gradient,
                       const QuantizedMoments& moments) {
  HWY_DYNAMIC_DISPATCH(AdamW8bitUpdate)
  (step, step_index, first, count, parameter, gradient, moments);
}
}  // namespace headroom::optim_kernels
#endif
