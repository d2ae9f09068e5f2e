#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <algorithm>
#include <cmath>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

using kernels::LogitGradients;

HWY_INLINE void AddRow(float* row, const float* bias, std::int64_t count) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, row + k), hn::LoadU(d, bias + k)), d, row + k);
  for (; k < count; ++k) row[k] += bias[k];
}

HWY_INLINE float RowMaximum(const float* row, std::int64_t count) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF a = hn::Set(d, row[0]), b = a;
  std::int64_t k = 0;
  for (; k + 2 * lanes <= count; k += 2 * lanes) {
    a = hn::Max(a, hn::LoadU(d, row + k));
    b = hn::Max(b, hn::LoadU(d, row + k + lanes));
  }
  float maximum = Largest(d, hn::Max(a, b));
  for (; k < count; ++k) maximum = std::max(maximum, row[k]);
  return maximum;
}

// The sum of e^(row - maximum); the row becomes its terms when `keep`.
HWY_INLINE float ExpRow(float* row, std::int64_t count, float maximum, bool keep) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VF shift = hn::Set(d, maximum);
  VF total = hn::Zero(d);
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes) {
    const VF e = Exp(d, hn::Sub(hn::LoadU(d, row + k), shift));
    if (keep) hn::StoreU(e, d, row + k);
    total = hn::Add(total, e);
  }
  if (k < count) {
    const VF e = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(count - k)),
                                    Exp(d, hn::Sub(LoadPart(d, row + k, count - k), shift)));
    if (keep) StorePart(e, d, row + k, count - k);
    total = hn::Add(total, e);
  }
  return Sum(d, total);
}

// to = row * scale; `to` may be the row itself, or start where it starts: a vector is read before
// it is written, and narrower numbers never reach what is still to be read.
template <class T>
HWY_INLINE void ScaleRow(const float* row, std::int64_t count, float scale, T* to) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VF factor = hn::Set(d, scale);
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes)
    StoreVector(hn::Mul(hn::LoadU(d, row + k), factor), d, to + k);
  if (k < count) StorePart(hn::Mul(LoadPart(d, row + k, count - k), factor), d, to + k, count - k);
}

void CrossEntropyRows(float* logits, const float* bias, const std::int64_t* targets,
                      const float* weights, std::int64_t ignore_index, float scale,
                      LogitGradients gradients, double* losses, std::int64_t begin,
                      std::int64_t end, std::int64_t num_classes) {
  for (std::int64_t r = begin; r < end; ++r) {
    float* row = logits + r * num_classes;
    const std::int64_t target = targets[r];
    if (target == ignore_index) {
      losses[r] = 0.0;
      if (gradients != LogitGradients::kNone)
        std::memset(row, 0, static_cast<std::size_t>(num_classes) * sizeof(float));
      continue;
    }
    if (bias != nullptr) AddRow(row, bias, num_classes);
    const float weight = weights == nullptr ? 1.0f : weights[r];
    const double target_logit = row[target], maximum = RowMaximum(row, num_classes);
    // The others are summed apart from the target: when it has nearly all the probability, loss and
    // gradient are what the others leave, and 1 + others - 1 would lose it.
    row[target] = -HUGE_VALF;
    const double others =
        ExpRow(row, num_classes, static_cast<float>(maximum), gradients != LogitGradients::kNone);
    const double sum = others + std::exp(target_logit - maximum);
    losses[r] = weight * (maximum - target_logit + std::log(sum));
    const auto factor = static_cast<float>(weight * scale / sum),
               at_target = static_cast<float>(-weight * scale * (others / sum));
    if (gradients == LogitGradients::kFloat) {
      ScaleRow(row, num_classes, factor, row);
      row[target] = at_target;
    } else if (gradients == LogitGradients::kBf16) {
      Bf16* halves = reinterpret_cast<Bf16*>(row);
      ScaleRow(row, num_classes, factor, halves);
      StorePart(hn::Set(DF(), at_target), DF(), halves + target, 1);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(CrossEntropyRows);

namespace kernels {

void cross_entropy_rows(float* logits, const float* bias, const std::int64_t* targets,
                        const float* weights, std::int64_t ignore_index, float scale,
                        LogitGradients gradients, double* losses, std::int64_t begin,
                        std::int64_t end, std::int64_t num_classes) {
  HWY_DYNAMIC_DISPATCH(CrossEntropyRows)
  (logits, bias, targets, weights, ignore_index, scale, gradients, losses, begin, end, num_classes);
}

}  // namespace kernels
}  // namespace headroom
#endif
