#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/pass_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

using kernels::Dropout;

using kernels::Values;

// Calls function<T>(...) for the type of `values`.
#define HEADROOM_CALL_FOR_TYPE(values, function, ...) \
  ((values).is_bf16 ? function<Bf16>(__VA_ARGS__) : function<float>(__VA_ARGS__))

template <class T>
void NormalizeRow(const T* x, const float* gamma, const float* beta, float mean, float rstd, T* y,
                  std::int64_t width) {
  const DF d;
  const VF vm = hn::Set(d, mean);
  const VF vr = hn::Set(d, rstd);
  ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
    const VF hat = hn::Mul(hn::Sub(load(x + j), vm), vr);
    const VF g = gamma == nullptr ? hn::Set(d, 1.0f) : load(gamma + j);
    const VF b = beta == nullptr ? hn::Zero(d) : load(beta + j);
    store(hn::MulAdd(hat, g, b), y + j);
  });
}

template <class T>
void LayerNormForwardOf(Values x_values, const float* gamma, const float* beta, float eps,
                        Values y_values, float* mean, float* rstd, std::int64_t begin,
                        std::int64_t end, std::int64_t width) {
  const T* x = x_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const float inverse = 1.0f / static_cast<float>(width);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* row = x + r * width;
    float m = 0.0f;
    if (mean != nullptr) {
      VF sum = hn::Zero(d);
      ForEachVector(width, [&](std::int64_t j, auto load, auto)
                               HWY_ATTR { sum = hn::Add(sum, load(row + j)); });
      m = mean[r] = Sum(d, sum) * inverse;
    }
    const VF vm = hn::Set(d, m);
    VF squares = hn::Zero(d);
    ForEachVector(width, [&](std::int64_t j, auto load, auto) HWY_ATTR {
      VF diff = hn::Sub(load(row + j), vm);
      if (j + lanes > width)
        diff = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(width - j)), diff);
      squares = hn::MulAdd(diff, diff, squares);
    });
    rstd[r] = 1.0f / std::sqrt(Sum(d, squares) * inverse + eps);
    if (y != nullptr) NormalizeRow(row, gamma, beta, m, rstd[r], y + r * width, width);
  }
}

void LayerNormForward(Values x, const float* gamma, const float* beta, float eps, Values y,
                      float* mean, float* rstd, std::int64_t begin, std::int64_t end,
                      std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(x, LayerNormForwardOf, x, gamma, beta, eps, y, mean, rstd, begin, end,
                         width);
}

template <class T>
void LayerNormApplyOf(Values x_values, const float* gamma, const float* beta, const float* mean,
                      const float* rstd, Values y_values, std::int64_t begin, std::int64_t end,
                      std::int64_t width) {
  const T* x = x_values.as<T>();
  T* y = y_values.as<T>();
  for (std::int64_t r = begin; r < end; ++r) {
    const float m = mean == nullptr ? 0.0f : mean[r];
    NormalizeRow(x + r * width, gamma, beta, m, rstd[r], y + r * width, width);
  }
}

void LayerNormApply(Values x, const float* gamma, const float* beta, const float* mean,
                    const float* rstd, Values y, std::int64_t begin, std::int64_t end,
                    std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(x, LayerNormApplyOf, x, gamma, beta, mean, rstd, y, begin, end, width);
}

template <class T>
void LayerNormBackwardOf(Values dy_values, Values x_values, const float* mean, const float* rstd,
                         const float* gamma, Values residual_values, Values dx_values,
                         float* dgamma, float* dbeta, std::int64_t begin, std::int64_t end,
                         std::int64_t width) {
  const T* dy = dy_values.as<T>();
  const T* x = x_values.as<T>();
  const T* residual = residual_values.as<T>();
  T* dx = dx_values.as<T>();
  const DF d;
  const float inverse = 1.0f / static_cast<float>(width);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* xr = x + r * width;
    const T* dr = dy + r * width;
    const VF vm = hn::Set(d, mean == nullptr ? 0.0f : mean[r]);
    const VF vr = hn::Set(d, rstd[r]);
    VF sum = hn::Zero(d);      // of dy * gamma
    VF sum_hat = hn::Zero(d);  // of dy * gamma * hat
    // A partial load of dy is 0 beyond the end, so that the sums need no mask.
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      const VF hat = hn::Mul(hn::Sub(load(xr + j), vm), vr);
      const VF grad = load(dr + j);
      if (dgamma != nullptr) store(hn::MulAdd(grad, hat, load(dgamma + j)), dgamma + j);
      if (dbeta != nullptr) store(hn::Add(grad, load(dbeta + j)), dbeta + j);
      const VF scaled = gamma == nullptr ? grad : hn::Mul(grad, load(gamma + j));
      sum = hn::Add(sum, scaled);
      sum_hat = hn::MulAdd(scaled, hat, sum_hat);
    });
    const VF a = hn::Set(d, mean == nullptr ? 0.0f : Sum(d, sum) * inverse);
    const VF c = hn::Set(d, Sum(d, sum_hat) * inverse);
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      const VF hat = hn::Mul(hn::Sub(load(xr + j), vm), vr);
      const VF grad = load(dr + j);
      const VF scaled = gamma == nullptr ? grad : hn::Mul(grad, load(gamma + j));
      VF v = hn::Mul(vr, hn::Sub(hn::Sub(scaled, a), hn::Mul(hat, c)));
      if (residual != nullptr) v = hn::Add(v, load(residual + r * width + j));
      store(v, dx + r * width + j);
    });
  }
}

void LayerNormBackward(Values dy, Values x, const float* mean, const float* rstd,
                       const float* gamma, Values residual, Values dx, float* dgamma, float* dbeta,
                       std::int64_t begin, std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(dy, LayerNormBackwardOf, dy, x, mean, rstd, gamma, residual, dx, dgamma,
                         dbeta, begin, end, width);
}

template <GeluKind kKind>
HWY_INLINE void GeluParts(VF x, VF& cdf, VF& slope) {
  if (kKind == GeluKind::kExact) {
    GeluExactParts(DF(), x, cdf, slope);
  } else if (kKind == GeluKind::kTanh) {
    GeluTanhParts(DF(), x, cdf, slope);
  } else {
    GeluQuickParts(DF(), x, cdf, slope);
  }
}

template <GeluKind kKind, class T>
void BiasGeluForwardOf(Values h_values, const float* bias, Values y_values, std::int64_t begin,
                       std::int64_t end, std::int64_t width) {
  const T* h = h_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  for (std::int64_t r = begin; r < end; ++r) {
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      VF x = load(h + r * width + j);
      if (bias != nullptr) x = hn::Add(x, load(bias + j));
      VF cdf = hn::Zero(d), slope = hn::Zero(d);
      GeluParts<kKind>(x, cdf, slope);
      store(hn::Mul(x, cdf), y + r * width + j);
    });
  }
}

template <GeluKind kKind, class T>
void BiasGeluBackwardOf(Values h_values, const float* bias, Values grad_values, Values y_values,
                        float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  const T* h = h_values.as<T>();
  T* grad = grad_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  for (std::int64_t r = begin; r < end; ++r) {
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      const std::int64_t at = r * width + j;
      VF x = load(h + at);
      if (bias != nullptr) x = hn::Add(x, load(bias + j));
      VF cdf = hn::Zero(d), slope = hn::Zero(d);
      GeluParts<kKind>(x, cdf, slope);
      if (y != nullptr) store(hn::Mul(x, cdf), y + at);
      const VF v = hn::Mul(load(grad + at), hn::MulAdd(x, slope, cdf));
      store(v, grad + at);
      if (dbias != nullptr) store(hn::Add(load(dbias + j), v), dbias + j);
    });
  }
}

template <class T>
void BiasGeluForwardAs(GeluKind kind, Values h, const float* bias, Values y, std::int64_t begin,
                       std::int64_t end, std::int64_t width) {
  if (kind == GeluKind::kExact) {
    BiasGeluForwardOf<GeluKind::kExact, T>(h, bias, y, begin, end, width);
  } else if (kind == GeluKind::kTanh) {
    BiasGeluForwardOf<GeluKind::kTanh, T>(h, bias, y, begin, end, width);
  } else {
    BiasGeluForwardOf<GeluKind::kQuick, T>(h, bias, y, begin, end, width);
  }
}

template <class T>
void BiasGeluBackwardAs(GeluKind kind, Values h, const float* bias, Values grad, Values y,
                        float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  if (kind == GeluKind::kExact) {
    BiasGeluBackwardOf<GeluKind::kExact, T>(h, bias, grad, y, dbias, begin, end, width);
  } else if (kind == GeluKind::kTanh) {
    BiasGeluBackwardOf<GeluKind::kTanh, T>(h, bias, grad, y, dbias, begin, end, width);
  } else {
    BiasGeluBackwardOf<GeluKind::kQuick, T>(h, bias, grad, y, dbias, begin, end, width);
  }
}

void BiasGeluForward(GeluKind kind, Values h, const float* bias, Values y, std::int64_t begin,
                     std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(h, BiasGeluForwardAs, kind, h, bias, y, begin, end, width);
}

void BiasGeluBackward(GeluKind kind, Values h, const float* bias, Values grad, Values y,
                      float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(h, BiasGeluBackwardAs, kind, h, bias, grad, y, dbias, begin, end, width);
}

// silu(gate) = gate * sigmoid, silu'(gate) = sigmoid (1 + gate (1 - sigmoid)).
HWY_INLINE void SiluParts(VF gate, VF& sigmoid, VF& slope) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  const VF e = Exp(d, hn::Min(hn::Set(d, 80.0f), hn::Neg(gate)));
  sigmoid = hn::Div(one, hn::Add(one, e));
  // 1 - sigmoid = e sigmoid, without the cancellation where the sigmoid is near 1.
  slope = hn::Mul(sigmoid, hn::MulAdd(gate, hn::Mul(e, sigmoid), one));
}

template <class T>
void SwigluForwardOf(Values h_values, const float* bias, Values y_values, std::int64_t y_stride,
                     std::int64_t begin, std::int64_t end, std::int64_t width) {
  const T* h = h_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  for (std::int64_t r = begin; r < end; ++r) {
    const T* row = h + r * 2 * width;
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      VF gate = load(row + j), up = load(row + width + j);
      if (bias != nullptr) {
        gate = hn::Add(gate, load(bias + j));
        up = hn::Add(up, load(bias + width + j));
      }
      VF sigmoid = hn::Zero(d), slope = hn::Zero(d);
      SiluParts(gate, sigmoid, slope);
      store(hn::Mul(hn::Mul(gate, sigmoid), up), y + r * y_stride + j);
    });
  }
}

void SwigluForward(Values h, const float* bias, Values y, std::int64_t y_stride, std::int64_t begin,
                   std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(h, SwigluForwardOf, h, bias, y, y_stride, begin, end, width);
}

template <class T>
void SwigluBackwardOf(Values h_values, const float* bias, Values grad_values, Values y_values,
                      std::int64_t y_stride, float* dbias, std::int64_t begin, std::int64_t end,
                      std::int64_t width) {
  const T* h = h_values.as<T>();
  T* grad = grad_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  for (std::int64_t r = begin; r < end; ++r) {
    const T* row = h + r * 2 * width;
    T* grad_row = grad + r * 2 * width;
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      VF gate = load(row + j), up = load(row + width + j);
      if (bias != nullptr) {
        gate = hn::Add(gate, load(bias + j));
        up = hn::Add(up, load(bias + width + j));
      }
      VF sigmoid = hn::Zero(d), slope = hn::Zero(d);
      SiluParts(gate, sigmoid, slope);
      const VF silu = hn::Mul(gate, sigmoid), dy = load(grad_row + j);
      if (y != nullptr) store(hn::Mul(silu, up), y + r * y_stride + j);
      const VF dgate = hn::Mul(hn::Mul(dy, up), slope), dup = hn::Mul(dy, silu);
      store(dgate, grad_row + j);
      store(dup, grad_row + width + j);
      if (dbias == nullptr) return;
      store(hn::Add(load(dbias + j), dgate), dbias + j);
      store(hn::Add(load(dbias + width + j), dup), dbias + width + j);
    });
  }
}

void SwigluBackward(Values h, const float* bias, Values grad, Values y, std::int64_t y_stride,
                    float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(h, SwigluBackwardOf, h, bias, grad, y, y_stride, dbias, begin, end, width);
}

template <class T>
void AddBiasOf(Values x_values, const float* bias, Values y_values, std::int64_t begin,
               std::int64_t end, std::int64_t width) {
  const T* x = x_values.as<T>();
  T* y = y_values.as<T>();
  for (std::int64_t r = begin; r < end; ++r) {
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      const VF v = load(x + r * width + j);
      store(bias == nullptr ? v : hn::Add(v, load(bias + j)), y + r * width + j);
    });
  }
}

void AddBias(Values x, const float* bias, Values y, std::int64_t begin, std::int64_t end,
             std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(x, AddBiasOf, x, bias, y, begin, end, width);
}

template <class T>
void DropoutAddOf(const Dropout& dropout, Values x_values, const float* bias,
                  Values residual_values, Values y_values, std::int64_t first_row,
                  std::int64_t begin, std::int64_t end, std::int64_t width) {
  const T* x = x_values.as<T>();
  const T* residual = residual_values.as<T>();
  T* y = y_values.as<T>();
  const DF d;
  const VF scale = hn::Set(d, dropout.scale);
  for (std::int64_t r = begin; r < end; ++r) {
    const kernels::RowKeys keys =
        kernels::row_keys(dropout.seed, static_cast<std::uint64_t>(first_row + r));
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      const std::int64_t at = r * width + j;
      VF v = load(x + at);
      if (bias != nullptr) v = hn::Add(v, load(bias + j));
      v = hn::Mul(v, KeepFactor(d, keys.key0, keys.key1, static_cast<std::uint32_t>(j),
                                dropout.threshold, scale));
      if (residual != nullptr) v = hn::Add(v, load(residual + at));
      store(v, y + at);
    });
  }
}

void DropoutAdd(const Dropout& dropout, Values x, const float* bias, Values residual, Values y,
                std::int64_t first_row, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(x, DropoutAddOf, dropout, x, bias, residual, y, first_row, begin, end,
                         width);
}

template <class T>
void ColumnSumsOf(Values x_values, std::int64_t stride, float* sums, std::int64_t begin,
                  std::int64_t end, std::int64_t width) {
  const T* x = x_values.as<T>();
  for (std::int64_t r = begin; r < end; ++r) {
    ForEachVector(width, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
      store(hn::Add(load(sums + j), load(x + r * stride + j)), sums + j);
    });
  }
}

void ColumnSums(Values x, std::int64_t stride, float* sums, std::int64_t begin, std::int64_t end,
                std::int64_t width) {
  HEADROOM_CALL_FOR_TYPE(x, ColumnSumsOf, x, stride, sums, begin, end, width);
}

void ReduceRows(const float* x, float* out, std::int64_t count, std::int64_t width, bool accumulate,
                std::int64_t begin, std::int64_t end) {
  const DF d;
  ForEachVector(end - begin, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
    VF sum = accumulate ? load(out + begin + j) : hn::Zero(d);
    for (std::int64_t r = 0; r < count; ++r) sum = hn::Add(sum, load(x + r * width + begin + j));
    store(sum, out + begin + j);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(LayerNormForward);
HWY_EXPORT(LayerNormApply);
HWY_EXPORT(LayerNormBackward);
HWY_EXPORT(BiasGeluForward);
HWY_EXPORT(BiasGeluBackward);
HWY_EXPORT(SwigluForward);
HWY_EXPORT(SwigluBackward);
HWY_EXPORT(AddBias);
HWY_EXPORT(DropoutAdd);
HWY_EXPORT(ColumnSums);
HWY_EXPORT(ReduceRows);

namespace kernels {

void layer_norm_forward(Values x, const float* gamma, const float* beta, float eps, Values y,
                        float* mean, float* rstd, std::int64_t begin, std::int64_t end,
                        std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(LayerNormForward)(x, gamma, beta, eps, y, mean, rstd, begin, end, width);
}

void layer_norm_apply(Values x, const float* gamma, const float* beta, const float* mean,
                      const float* rstd, Values y, std::int64_t begin, std::int64_t end,
                      std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(LayerNormApply)(x, gamma, beta, mean, rstd, y, begin, end, width);
}

void layer_norm_backward(Values dy, Values x, const float* mean, const float* rstd,
                         const float* gamma, Values residual, Values dx, float* dgamma,
                         float* dbeta, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(LayerNormBackward)
  (dy, x, mean, rstd, gamma, residual, dx, dgamma, dbeta, begin, end, width);
}

void bias_gelu_forward(GeluKind kind, Values h, const float* bias, Values y, std::int64_t begin,
                       std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(BiasGeluForward)(kind, h, bias, y, begin, end, width);
}

void bias_gelu_backward(GeluKind kind, Values h, const float* bias, Values d, Values y,
                        float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(BiasGeluBackward)(kind, h, bias, d, y, dbias, begin, end, width);
}

void swiglu_forward(Values h, const float* bias, Values y, std::int64_t y_stride,
                    std::int64_t begin, std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(SwigluForward)(h, bias, y, y_stride, begin, end, width);
}

void swiglu_backward(Values h, const float* bias, Values d, Values y, std::int64_t y_stride,
                     float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(SwigluBackward)(h, bias, d, y, y_stride, dbias, begin, end, width);
}

void add_bias(Values x, const float* bias, Values y, std::int64_t begin, std::int64_t end,
              std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(AddBias)(x, bias, y, begin, end, width);
}

void dropout_add(const Dropout& dropout, Values x, const float* bias, Values residual, Values y,
                 std::int64_t first_row, std::int64_t begin, std::int64_t end, std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(DropoutAdd)(dropout, x, bias, residual, y, first_row, begin, end, width);
}

void column_sums(Values x, std::int64_t stride, float* sums, std::int64_t begin, std::int64_t end,
                 std::int64_t width) {
  HWY_DYNAMIC_DISPATCH(ColumnSums)(x, stride, sums, begin, end, width);
}

void reduce_rows(const float* x, float* out, std::int64_t count, std::int64_t width,
                 bool accumulate, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ReduceRows)(x, out, count, width, accumulate, begin, end);
}

}  // namespace kernels
}  // namespace headroom
#endif
