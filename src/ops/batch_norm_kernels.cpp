#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/batch_norm_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

using kernels::ChannelPlanes;
using kernels::ChannelScales;

// Channels that are summed side by side. Each is a chain of additions that wait for each other, so
// that one alone would take four cycles for an element.
constexpr std::int64_t kSideBySide = 8;

// Where the planes of some channels of a sample start. Beyond the last channel it is taken again,
// and its sum not used.
struct PlaneStarts {
  PlaneStarts(const float* x, const ChannelPlanes& sizes, std::int64_t sample, std::int64_t first,
              std::int64_t end) {
    for (std::int64_t k = 0; k < kSideBySide; ++k) {
      const std::int64_t channel = std::min(first + k, end - 1);
      at[k] = x + (sample * sizes.num_channels + channel) * sizes.plane;
    }
  }
  const float* at[kSideBySide];
};

// Adds term(value, channel) of each element to its channel's sum.
template <class Term>
HWY_INLINE void AddScalars(const PlaneStarts& starts, std::int64_t begin, std::int64_t end,
                           const Term& term, double* sums) {
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t k = 0; k < kSideBySide; ++k)
      sums[k] += static_cast<double>(term.one(starts.at[k][i], k));
  }
}

#if HWY_MAX_BYTES >= 32

using D4 = hn::FixedTag<float, 4>;
using D4Double = hn::FixedTag<double, 4>;
using V4 = hn::Vec<D4>;
constexpr std::int64_t kLanes = 4;
constexpr std::int64_t kNumGroups = kSideBySide / kLanes;

struct Itself {
  HWY_INLINE float one(float value, std::int64_t /*channel*/) const { return value; }
  HWY_INLINE V4 four(V4 values, std::int64_t /*group*/) const { return values; }
};

// The difference and its square are rounded to float, as LibTorch has it.
struct SquaredDistance {
  const float* means;  // kSideBySide
  HWY_INLINE float one(float value, std::int64_t channel) const {
    const float difference = value - means[channel];
    return difference * difference;
  }
  HWY_INLINE V4 four(V4 values, std::int64_t group) const {
    const V4 difference = hn::Sub(values, hn::LoadU(D4(), means + group * kLanes));
    return hn::Mul(difference, difference);
  }
};

// Four pixels of four channels at a time are turned, so that a lane is a channel.
template <class Term>
void AddPlanes(const PlaneStarts& starts, std::int64_t plane, const Term& term, double* sums) {
  const D4 d;
  const D4Double dd;
  hn::Vec<D4Double> totals[kNumGroups];
  for (std::int64_t g = 0; g < kNumGroups; ++g) totals[g] = hn::LoadU(dd, sums + g * kLanes);
  std::int64_t i = 0;
  for (; i + kLanes <= plane; i += kLanes) {
    for (std::int64_t g = 0; g < kNumGroups; ++g) {
      const float* const* rows = starts.at + g * kLanes;
      const V4 a = hn::LoadU(d, rows[0] + i), b = hn::LoadU(d, rows[1] + i);
      const V4 c = hn::LoadU(d, rows[2] + i), e = hn::LoadU(d, rows[3] + i);
      const V4 ab01 = hn::InterleaveLower(d, a, b), ce01 = hn::InterleaveLower(d, c, e);
      const V4 ab23 = hn::InterleaveUpper(d, a, b), ce23 = hn::InterleaveUpper(d, c, e);
      const V4 pixels[kLanes] = {
          hn::ConcatLowerLower(d, ce01, ab01), hn::ConcatUpperUpper(d, ce01, ab01),
          hn::ConcatLowerLower(d, ce23, ab23), hn::ConcatUpperUpper(d, ce23, ab23)};
      for (const V4& pixel : pixels)
        totals[g] = hn::Add(totals[g], hn::PromoteTo(dd, term.four(pixel, g)));
    }
  }
  for (std::int64_t g = 0; g < kNumGroups; ++g) hn::StoreU(totals[g], dd, sums + g * kLanes);
  AddScalars(starts, i, plane, term, sums);
}

#else

struct Itself {
  float one(float value, std::int64_t /*channel*/) const { return value; }
};

struct SquaredDistance {
  const float* means;
  float one(float value, std::int64_t channel) const {
    const float difference = value - means[channel];
    return difference * difference;
  }
};

template <class Term>
void AddPlanes(const PlaneStarts& starts, std::int64_t plane, const Term& term, double* sums) {
  AddScalars(starts, 0, plane, term, sums);
}

#endif

template <class Term>
void SumChannels(const float* x, const ChannelPlanes& sizes, std::int64_t first, std::int64_t end,
                 const Term& term, double* sums) {
  std::fill(sums, sums + kSideBySide, 0.0);
  for (std::int64_t n = 0; n < sizes.num_samples; ++n)
    AddPlanes(PlaneStarts(x, sizes, n, first, end), sizes.plane, term, sums);
}

void ChannelStatistics(const float* x, const ChannelPlanes& sizes, float* mean, float* square_sum,
                       std::int64_t begin, std::int64_t end) {
  const double count = static_cast<double>(sizes.num_samples * sizes.plane);
  for (std::int64_t first = begin; first < end; first += kSideBySide) {
    const std::int64_t num = std::min(kSideBySide, end - first);
    double sums[kSideBySide];
    float means[kSideBySide] = {};
    SumChannels(x, sizes, first, end, Itself(), sums);
    for (std::int64_t k = 0; k < kSideBySide; ++k) means[k] = static_cast<float>(sums[k] / count);
    std::copy(means, means + num, mean + first);
    SumChannels(x, sizes, first, end, SquaredDistance{means}, sums);
    for (std::int64_t k = 0; k < num; ++k) square_sum[first + k] = static_cast<float>(sums[k]);
  }
}

// Calls apply(x * scale + shift, sample, index, count) for the elements of some channels, `count`
// of them at a time.
template <class Apply>
HWY_INLINE void ForNormalized(const float* x, const ChannelPlanes& sizes,
                              const ChannelScales& scales, std::int64_t begin, std::int64_t end,
                              const Apply& apply) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t n = 0; n < sizes.num_samples; ++n) {
    for (std::int64_t c = begin; c < end; ++c) {
      const std::int64_t start = (n * sizes.num_channels + c) * sizes.plane;
      const float rstd = scales.rstd[c];
      const VF scale = hn::Set(d, scales.weight == nullptr ? rstd : rstd * scales.weight[c]);
      const VF shift = hn::NegMulAdd(hn::Set(d, scales.mean[c]), scale,
                                     hn::Set(d, scales.bias == nullptr ? 0.0f : scales.bias[c]));
      std::int64_t i = start;
      for (; i + lanes <= start + sizes.plane; i += lanes)
        apply(hn::MulAdd(hn::LoadU(d, x + i), scale, shift), n, i, lanes);
      const std::int64_t rest = start + sizes.plane - i;
      if (rest > 0) apply(hn::MulAdd(LoadPart(d, x + i, rest), scale, shift), n, i, rest);
    }
  }
}

HWY_INLINE void StoreSome(VF values, float* to, std::int64_t count) {
  const DF d;
  if (count == static_cast<std::int64_t>(hn::Lanes(d)))
    hn::StoreU(values, d, to);
  else
    StorePart(values, d, to, count);
}

void NormalizeChannels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                       bool relu, float* y, std::int64_t begin, std::int64_t end) {
  const DF d;
  if (!relu) {
    ForNormalized(x, sizes, scales, begin, end,
                  [&](VF value, std::int64_t /*sample*/, std::int64_t i, std::int64_t count) {
                    StoreSome(value, y + i, count);
                  });
    return;
  }
  // Zeros keep their sign, and what is not a number stays.
  ForNormalized(x, sizes, scales, begin, end,
                [&](VF value, std::int64_t /*sample*/, std::int64_t i, std::int64_t count) {
                  StoreSome(hn::IfThenElse(hn::Lt(value, hn::Zero(d)), hn::Zero(d), value), y + i,
                            count);
                });
}

void MaskChannels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                  const float* dy, std::int64_t dy_stride, float* masked, std::int64_t begin,
                  std::int64_t end) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t between = dy_stride - sizes.num_channels * sizes.plane;
  ForNormalized(x, sizes, scales, begin, end,
                [&](VF value, std::int64_t sample, std::int64_t i, std::int64_t count) {
                  const float* from = dy + i + sample * between;
                  const VF gradient =
                      count == lanes ? hn::LoadU(d, from) : LoadPart(d, from, count);
                  StoreSome(hn::IfThenElse(hn::Le(value, hn::Zero(d)), hn::Zero(d), gradient),
                            masked + i, count);
                });
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(ChannelStatistics);
HWY_EXPORT(NormalizeChannels);
HWY_EXPORT(MaskChannels);

namespace kernels {

void channel_statistics(const float* x, const ChannelPlanes& sizes, float* mean, float* square_sum,
                        std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ChannelStatistics)(x, sizes, mean, square_sum, begin, end);
}
void normalize_channels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                        bool relu, float* y, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(NormalizeChannels)(x, sizes, scales, relu, y, begin, end);
}
void mask_channels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                   const float* dy, std::int64_t dy_stride, float* masked, std::int64_t begin,
                   std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(MaskChannels)(x, sizes, scales, dy, dy_stride, masked, begin, end);
}

}  // namespace kernels
}  // namespace headroom
#endif
