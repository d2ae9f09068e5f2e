#include "optim/update_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/update_kernels.cpp"
#include <hwy/foreach_target.h>  // compiles this file once per target
#include <hwy/highway.h>

#include "optim/vector_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom::optim_kernels::HWY_NAMESPACE {

struct SgdPlain {
  V lr, l2;
  HWY_INLINE void operator()(const Pointers<2>& at) const {
    const D d;
    const V p = hn::LoadU(d, at[0]);
    const V g = hn::MulAdd(l2, p, hn::LoadU(d, at[1]));
    hn::StoreU(hn::NegMulAdd(lr, g, p), d, at[0]);
  }
};

struct SgdMomentum {
  V lr, l2, momentum, one_minus_dampening;
  bool first, nesterov;
  HWY_INLINE void operator()(const Pointers<3>& at) const {
    const D d;
    const V p = hn::LoadU(d, at[0]);
    const V g = hn::MulAdd(l2, p, hn::LoadU(d, at[2]));
    const V buffer =
        first ? g : hn::MulAdd(momentum, hn::LoadU(d, at[1]), hn::Mul(one_minus_dampening, g));
    const V direction = nesterov ? hn::MulAdd(momentum, buffer, g) : buffer;
    hn::StoreU(buffer, d, at[1]);
    hn::StoreU(hn::NegMulAdd(lr, direction, p), d, at[0]);
  }
};

void SgdUpdate(const SgdStep& step, std::int64_t count, float* parameter, const float* gradient,
               float* buffer) {
  const D d;
  auto* g = const_cast<float*>(gradient);  // read only: it is not among the written arrays
  if (buffer == nullptr) {
    const SgdPlain body{hn::Set(d, step.lr), hn::Set(d, step.l2)};
    for_each_vector<1, 2>(count, {parameter, g}, body);
  } else {
    const SgdMomentum body{hn::Set(d, step.lr),
                           hn::Set(d, step.l2),
                           hn::Set(d, step.momentum),
                           hn::Set(d, step.one_minus_dampening),
                           step.first,
                           step.nesterov};
    for_each_vector<2, 3>(count, {parameter, buffer, g}, body);
  }
}

struct AdamBody {
  V shrink, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_root_bias2, eps, step_size;
  HWY_INLINE void operator()(const Pointers<4>& at) const {
    const D d;
    const V p = hn::LoadU(d, at[0]);
    const V g = hn::MulAdd(l2, p, hn::LoadU(d, at[3]));
    const V m = hn::MulAdd(beta1, hn::LoadU(d, at[1]), hn::Mul(one_minus_beta1, g));
    const V v = hn::MulAdd(beta2, hn::LoadU(d, at[2]), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
    const V denominator = hn::MulAdd(hn::Sqrt(v), inv_root_bias2, eps);
    hn::StoreU(m, d, at[1]);
    hn::StoreU(v, d, at[2]);
    hn::StoreU(hn::NegMulAdd(step_size, hn::Div(m, denominator), hn::Mul(p, shrink)), d, at[0]);
  }
};

void AdamUpdate(const AdamStep& step, std::int64_t count, float* parameter, const float* gradient,
                float* exp_avg, float* exp_avg_sq) {
  const D d;
  const AdamBody body{
      hn::Set(d, step.shrink),          hn::Set(d, step.l2),    hn::Set(d, step.beta1),
      hn::Set(d, step.one_minus_beta1), hn::Set(d, step.beta2), hn::Set(d, step.one_minus_beta2),
      hn::Set(d, step.inv_root_bias2),  hn::Set(d, step.eps),   hn::Set(d, step.step_size)};
  for_each_vector<3, 4>(count, {parameter, exp_avg, exp_avg_sq, const_cast<float*>(gradient)},
                        body);
}

struct ScaleAndCheck {
  V factor;
  V zero_if_finite;  // x * 0 is 0 for every finite x and NaN for the others
  HWY_INLINE void operator()(const Pointers<1>& at) {
    const D d;
    const V product = hn::Mul(hn::LoadU(d, at[0]), factor);
    zero_if_finite = hn::MulAdd(product, hn::Zero(d), zero_if_finite);
    hn::StoreU(product, d, at[0]);
  }
};

bool ScaleAndCheckAll(float factor, std::int64_t count, float* values) {
  const D d;
  ScaleAndCheck body{hn::Set(d, factor), hn::Zero(d)};
  for_each_vector<1, 1>(count, {values}, body);
  return hn::AllTrue(d, hn::Eq(body.zero_if_finite, hn::Zero(d)));
}

// Eight sums on every target, so that the bits are the same on all of them: the product of two
// floats is exact in double.
double SumOfSquares(std::int64_t count, const float* values) {
  constexpr std::int64_t kNumSums = 8;
  const hn::CappedTag<double, kNumSums> d;
  const hn::Rebind<float, decltype(d)> df;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kNumVectors = kNumSums / kLanes;
  hn::Vec<decltype(d)> vectors[kNumVectors];
#pragma GCC unroll 8
  for (std::int64_t v = 0; v < kNumVectors; ++v) vectors[v] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kNumSums <= count; i += kNumSums) {
#pragma GCC unroll 8
    for (std::int64_t v = 0; v < kNumVectors; ++v) {
      const auto value = hn::PromoteTo(d, hn::LoadU(df, values + i + v * kLanes));
      vectors[v] = hn::MulAdd(value, value, vectors[v]);
    }
  }
  HWY_ALIGN double sums[kNumSums];
#pragma GCC unroll 8
  for (std::int64_t v = 0; v < kNumVectors; ++v) hn::StoreU(vectors[v], d, sums + v * kLanes);
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace headroom::optim_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::optim_kernels {
HWY_EXPORT(SgdUpdate);
HWY_EXPORT(AdamUpdate);
HWY_EXPORT(ScaleAndCheckAll);
HWY_EXPORT(SumOfSquares);

void sgd_update(const SgdStep& step, std::int64_t count, float* parameter, const float* gradient,
                float* buffer) {
  HWY_DYNAMIC_DISPATCH(SgdUpdate)(step, count, parameter, gradient, buffer);
}

void adam_update(const AdamStep& step, std::int64_t count, float* parameter, const float* gradient,
                 float* exp_avg, float* exp_avg_sq) {
  HWY_DYNAMIC_DISPATCH(AdamUpdate)(step, count, parameter, gradient, exp_avg, exp_avg_sq);
}

bool scale_and_check(float factor, std::int64_t count, float* values) {
  return HWY_DYNAMIC_DISPATCH(ScaleAndCheckAll)(factor, count, values);
}

double sum_of_squares(std::int64_t count, const float* values) {
  return HWY_DYNAMIC_DISPATCH(SumOfSquares)(count, values);
}
}  // namespace headroom::optim_kernels
#endif
