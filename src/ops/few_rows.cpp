#include "ops/few_rows.h"

#include "core/parallel.h"
#include "ops/kernels.h"
#include "ops/passes.h"

#include <algorithm>

namespace headroom::ops {
namespace {

// With fewer rows a BLAS does not pack the weight.
constexpr std::int64_t kLeastRows = 3;

// Columns or rows that the kernels take at once: a thread has whole ones.
constexpr std::int64_t kUnit = 32;

// Calls body(begin, end) for parts of [0, size), each of `cost` multiplications.
template <class Body>
void for_parts(std::int64_t size, std::int64_t cost, const Body& body) {
  constexpr std::int64_t kLeastWork = 1 << 18;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kLeastWork / std::max<std::int64_t>(1, cost * kUnit));
  parallel_for(0, (size + kUnit - 1) / kUnit, grain, [&](std::int64_t begin, std::int64_t end) {
    body(begin * kUnit, std::min(size, end * kUnit));
  });
}

const float* floats_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
}

}  // namespace

bool has_few_rows(const at::Tensor& x, const at::Tensor& weight) {
  const bool is_here = (x.is_cpu() && weight.is_cpu()) || (x.is_meta() && weight.is_meta());
  return is_here && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
         weight.is_contiguous() && weight.numel() > 0 && x.dim() == 2 && x.size(0) >= kLeastRows &&
         x.size(0) <= kernels::kMostFewRows;
}

void few_rows_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      bool relu, at::Tensor y) {
  if (x.is_meta()) return;
  const std::int64_t rows = x.size(0), in = x.size(1), out = weight.size(0);
  const float *px = x.data_ptr<float>(), *pw = weight.data_ptr<float>();
  const float* pb = present(bias) ? bias.data_ptr<float>() : nullptr;
  float* py = y.data_ptr<float>();
  for_parts(out, rows * in, [&](std::int64_t begin, std::int64_t end) {
    kernels::few_rows_forward(px, pw, pb, relu, py, rows, in, out, begin, end);
  });
}

void few_rows_grad_input(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& weight,
                         at::Tensor dx) {
  if (dy.is_meta()) return;
  const std::int64_t rows = dy.size(0), out = dy.size(1), in = weight.size(1);
  const float *pd = dy.data_ptr<float>(), *py = floats_or_null(y), *pw = weight.data_ptr<float>();
  float* px = dx.data_ptr<float>();
  for_parts(in, rows * out, [&](std::int64_t begin, std::int64_t end) {
    kernels::few_rows_grad_input(pd, py, pw, px, rows, in, out, begin, end);
  });
}

void few_rows_grad_weight(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& x,
                          at::Tensor dweight, bool accumulate) {
  if (dy.is_meta()) return;
  const std::int64_t rows = dy.size(0), out = dy.size(1), in = x.size(1);
  const float *pd = dy.data_ptr<float>(), *py = floats_or_null(y), *px = x.data_ptr<float>();
  float* pw = dweight.data_ptr<float>();
  for_parts(out, rows * in, [&](std::int64_t begin, std::int64_t end) {
    kernels::few_rows_grad_weight(pd, py, px, pw, accumulate, rows, in, out, begin, end);
  });
}

void few_rows_grad_bias(const at::Tensor& dy, const at::Tensor& y, at::Tensor dbias,
                        bool accumulate) {
  if (dy.is_meta()) return;
  kernels::few_rows_grad_bias(dy.data_ptr<float>(), floats_or_null(y), dbias.data_ptr<float>(),
                              accumulate, dy.size(0), dy.size(1));
}

}  // namespace headroom::ops
