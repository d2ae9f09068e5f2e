#include "optim/adafactor_kernels.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adafactor_kernels.cpp"
#include <hwy/foreach_target.h>  // compiles this file once per target
#include <hwy/highway.h>

#include "optim/vector_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom::optim_kernels::HWY_NAMESPACE {

HWY_INLINE float* unwritten(const float* array) { return const_cast<float*>(array); }
HWY_INLINE float sum_of(V lanes) { return hn::GetLane(hn::SumOfLanes(D(), lanes)); }

struct AddSquares {
  V sum;
  HWY_INLINE void operator()(const Pointers<1>& at) {
    const V x = hn::LoadU(D(), at[0]);
    sum = hn::MulAdd(x, x, sum);
  }
};

double SquareSum(std::int64_t count, const float* values) {
  constexpr std::int64_t kRun = 4096;  // a float sum of more terms would lose digits
  double sum = 0;
  for (std::int64_t i = 0; i < count; i += kRun) {
    AddSquares body{hn::Zero(D())};
    for_each_vector<0, 1>(std::min(kRun, count - i), {unwritten(values + i)}, body);
    sum += static_cast<double>(sum_of(body.sum));
  }
  return sum;
}

struct AddRowAndColumn {
  V row;
  HWY_INLINE void operator()(const Pointers<2>& at) {
    const D d;
    const V g = hn::LoadU(d, at[1]);
    const V square = hn::Mul(g, g);
    row = hn::Add(row, square);
    hn::StoreU(hn::Add(hn::LoadU(d, at[0]), square), d, at[0]);
  }
};

void AddSquareSums(const Tile& tile, const float* gradient, float* row_sums, float* column_sums) {
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    AddRowAndColumn body{hn::Zero(D())};
    for_each_vector<1, 2>(tile.columns, {column_sums, unwritten(gradient + i * tile.stride)}, body);
    row_sums[i] += sum_of(body.row);
  }
}

struct InverseRoot {
  HWY_INLINE void operator()(const Pointers<2>& at) const {
    const D d;
    hn::StoreU(hn::Div(hn::Set(d, 1.0f), hn::Sqrt(hn::LoadU(d, at[1]))), d, at[0]);
  }
};

void InverseRoots(std::int64_t count, const float* moments, float* factors) {
  const InverseRoot body;
  for_each_vector<1, 2>(count, {factors, unwritten(moments)}, body);
}

HWY_INLINE float row_factor(const FactoredMoment& moment, std::int64_t row) {
  return 1.0f / std::sqrt(moment.row_moments[row] * moment.inverse_row_mean);
}

struct AddFactoredSquares {
  V row_factor, sum;
  HWY_INLINE void operator()(const Pointers<2>& at) {
    const D d;
    const V u = hn::Mul(hn::LoadU(d, at[0]), hn::Mul(row_factor, hn::LoadU(d, at[1])));
    sum = hn::MulAdd(u, u, sum);
  }
};

double FactoredSquareSum(const Tile& tile, const float* gradient, const FactoredMoment& moment) {
  double sum = 0;
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    AddFactoredSquares body{hn::Set(D(), row_factor(moment, i)), hn::Zero(D())};
    for_each_vector<0, 2>(tile.columns,
                          {unwritten(gradient + i * tile.stride), unwritten(moment.column_factors)},
                          body);
    sum += static_cast<double>(sum_of(body.sum));
  }
  return sum;
}

struct Apply {
  V decay, scale, beta1, one_minus_beta1;
  explicit HWY_INLINE Apply(const AdafactorStep& step)
      : decay(hn::Set(D(), step.decay)),
        scale(hn::Set(D(), step.scale)),
        beta1(hn::Set(D(), step.beta1)),
        one_minus_beta1(hn::Set(D(), 1.0f - step.beta1)) {}
  /// Takes the update and the decay off at once: the parameter, by far the largest number here, is
  /// rounded once.
  HWY_INLINE void subtract(V update, float* parameter) const {
    const D d;
    const V p = hn::LoadU(d, parameter);
    hn::StoreU(hn::Sub(p, hn::MulAdd(decay, p, update)), d, parameter);
  }
  HWY_INLINE void plainly(V u, float* parameter) const { subtract(hn::Mul(scale, u), parameter); }
  HWY_INLINE void averaged(V u, float* parameter, float* exp_avg) const {
    const D d;
    const V m =
        hn::MulAdd(beta1, hn::LoadU(d, exp_avg), hn::Mul(one_minus_beta1, hn::Mul(scale, u)));
    hn::StoreU(m, d, exp_avg);
    subtract(m, parameter);
  }
};

struct ApplyFactored {
  Apply apply;
  V row_factor;
  HWY_INLINE V update(const float* gradient, const float* column_factors) const {
    const D d;
    return hn::Mul(hn::LoadU(d, gradient), hn::Mul(row_factor, hn::LoadU(d, column_factors)));
  }
  HWY_INLINE void operator()(const Pointers<3>& at) const {
    apply.plainly(update(at[1], at[2]), at[0]);
  }
  HWY_INLINE void operator()(const Pointers<4>& at) const {
    apply.averaged(update(at[2], at[3]), at[0], at[1]);
  }
};

void FactoredUpdate(const AdafactorStep& step, const Tile& tile, const FactoredMoment& moment,
                    float* parameter, const float* gradient, float* exp_avg) {
  float* factors = unwritten(moment.column_factors);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const ApplyFactored body{Apply(step), hn::Set(D(), row_factor(moment, i))};
    const std::int64_t at = i * tile.stride;
    if (exp_avg == nullptr) {
      for_each_vector<1, 3>(tile.columns, {parameter + at, unwritten(gradient + at), factors},
                            body);
    } else {
      for_each_vector<2, 4>(
          tile.columns, {parameter + at, exp_avg + at, unwritten(gradient + at), factors}, body);
    }
  }
}

struct MoveFullMoment {
  V beta2, one_minus_beta2, eps, sum;
  HWY_INLINE void operator()(const Pointers<2>& at) {
    const D d;
    const V g = hn::LoadU(d, at[1]);
    const V square = hn::MulAdd(g, g, eps);
    const V v = hn::MulAdd(beta2, hn::LoadU(d, at[0]), hn::Mul(one_minus_beta2, square));
    // The padding of the last vector has g = 0 and v = (1 - beta2) * eps, which may be too small
    // for a float: 0 / 0 must not count.
    const V u = hn::IfThenElseZero(hn::Gt(v, hn::Zero(d)), hn::Div(g, hn::Sqrt(v)));
    sum = hn::MulAdd(u, u, sum);
    hn::StoreU(v, d, at[0]);
  }
};

double FullSquareSum(std::int64_t count, float beta2, float one_minus_beta2, float eps,
                     const float* gradient, float* exp_avg_sq) {
  const D d;
  constexpr std::int64_t kRun = 4096;
  double sum = 0;
  for (std::int64_t i = 0; i < count; i += kRun) {
    MoveFullMoment body{hn::Set(d, beta2), hn::Set(d, one_minus_beta2), hn::Set(d, eps),
                        hn::Zero(d)};
    for_each_vector<1, 2>(std::min(kRun, count - i), {exp_avg_sq + i, unwritten(gradient + i)},
                          body);
    sum += static_cast<double>(sum_of(body.sum));
  }
  return sum;
}

struct ApplyFull {
  Apply apply;
  HWY_INLINE V update(const float* gradient, const float* exp_avg_sq) const {
    const D d;
    const V v = hn::LoadU(d, exp_avg_sq);
    return hn::IfThenElseZero(hn::Gt(v, hn::Zero(d)), hn::Div(hn::LoadU(d, gradient), hn::Sqrt(v)));
  }
  HWY_INLINE void operator()(const Pointers<3>& at) const {
    apply.plainly(update(at[1], at[2]), at[0]);
  }
  HWY_INLINE void operator()(const Pointers<4>& at) const {
    apply.averaged(update(at[2], at[3]), at[0], at[1]);
  }
};

void FullUpdate(const AdafactorStep& step, std::int64_t count, float* parameter,
                const float* gradient, const float* exp_avg_sq, float* exp_avg) {
  const ApplyFull body{Apply(step)};
  if (exp_avg == nullptr) {
    for_each_vector<1, 3>(count, {parameter, unwritten(gradient), unwritten(exp_avg_sq)}, body);
  } else {
    for_each_vector<2, 4>(count, {parameter, exp_avg, unwritten(gradient), unwritten(exp_avg_sq)},
                          body);
  }
}

}  // namespace headroom::optim_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::optim_kernels {
HWY_EXPORT(SquareSum);
HWY_EXPORT(AddSquareSums);
HWY_EXPORT(InverseRoots);
HWY_EXPORT(FactoredSquareSum);
HWY_EXPORT(FactoredUpdate);
HWY_EXPORT(FullSquareSum);
HWY_EXPORT(FullUpdate);

double square_sum(std::int64_t count, const float* values) {
  return HWY_DYNAMIC_DISPATCH(SquareSum)(count, values);
}

void add_square_sums(const Tile& tile, const float* gradient, float* row_sums, float* column_sums) {
  HWY_DYNAMIC_DISPATCH(AddSquareSums)(tile, gradient, row_sums, column_sums);
}

void inverse_roots(std::int64_t count, const float* moments, float* factors) {
  HWY_DYNAMIC_DISPATCH(InverseRoots)(count, moments, factors);
}

double factored_square_sum(const Tile& tile, const float* gradient, const FactoredMoment& moment) {
  return HWY_DYNAMIC_DISPATCH(FactoredSquareSum)(tile, gradient, moment);
}

void factored_update(const AdafactorStep& step, const Tile& tile, const FactoredMoment& moment,
                     float* parameter, const float* gradient, float* exp_avg) {
  HWY_DYNAMIC_DISPATCH(FactoredUpdate)(step, tile, moment, parameter, gradient, exp_avg);
}

double full_square_sum(std::int64_t count, float beta2, float one_minus_beta2, float eps,
                       const float* gradient, float* exp_avg_sq) {
  return HWY_DYNAMIC_DISPATCH(FullSquareSum)(count, beta2, one_minus_beta2, eps, gradient,
                                             exp_avg_sq);
}

void full_update(const AdafactorStep& step, std::int64_t count, float* parameter,
                 const float* gradient, const float* exp_avg_sq, float* exp_avg) {
  HWY_DYNAMIC_DISPATCH(FullUpdate)(step, count, parameter, gradient, exp_avg_sq, exp_avg);
}
}  // namespace headroom::optim_kernels
#endif
