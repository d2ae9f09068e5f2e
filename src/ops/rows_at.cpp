#include "ops/rows_at.h"

#include "core/parallel.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/sizes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

#include <cstring>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// dx (B, T, C) = the rows of drows at their positions, and 0 elsewhere.
template <class T>
void add_rows(const at::Tensor& drows, const at::Tensor& positions, const at::Tensor& dx) {
  const std::int64_t per_sample = positions.size(1), length = dx.size(1), width = dx.size(2);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  const T* from = drows.data_ptr<T>();
  T* to = dx.data_ptr<T>();
  // A position may be there twice: one thread has all of a sample.
  parallel_for(0, dx.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    std::memset(static_cast<void*>(to + begin * length * width), 0,
                static_cast<std::size_t>((end - begin) * length * width) * sizeof(T));
    for (std::int64_t i = begin * per_sample; i < end * per_sample; ++i) {
      T* row = to + (i / per_sample * length + position[i]) * width;
      for (std::int64_t j = 0; j < width; ++j) row[j] = row[j] + from[i * width + j];
    }
  });
}

struct RowsAt : torch::autograd::Function<RowsAt> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& positions) {
    const std::int64_t length = x.size(1), width = x.size(2), per_sample = positions.size(1);
    at::Tensor rows = ops::make_values({positions.numel(), width}, x);
    ctx->save_for_backward({positions});
    ctx->saved_data["length"] = length;
    if (x.is_meta()) return rows;
    const std::int64_t* position = positions.data_ptr<std::int64_t>();
    const std::int64_t row_bytes = width * static_cast<std::int64_t>(x.element_size());
    const char* from = static_cast<const char*>(x.data_ptr());
    char* to = static_cast<char*>(rows.data_ptr());
    parallel_for(0, positions.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(to + i * row_bytes, from + (i / per_sample * length + position[i]) * row_bytes,
                    static_cast<std::size_t>(row_bytes));
      }
    });
    return rows;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("rows_at");
    const at::Tensor positions = ctx->get_saved_variables()[0], drows = grads[0].contiguous();
    const std::int64_t num_samples = positions.size(0), length = ctx->saved_data["length"].toInt();
    const std::int64_t width = drows.size(1);
    at::Tensor dx = ops::make_values({num_samples, length, width}, drows);
    if (dx.is_meta()) return {dx, {}};
    if (dx.scalar_type() == at::kBFloat16) {
      add_rows<c10::BFloat16>(drows, positions, dx);
    } else {
      add_rows<float>(drows, positions, dx);
    }
    return {dx, {}};
  }
};

}  // namespace

at::Tensor rows_at(const at::Tensor& x, const at::Tensor& positions) {
  ops::check_sizes(positions, {x.size(0), positions.size(-1)}, "positions");
  ops::check_range(positions, x.size(1), 0, "position");
  if (!ops::has_kernels(x)) {
    const at::Tensor index =
        positions.unsqueeze(2).expand({positions.size(0), positions.size(1), x.size(2)});
    return x.gather(1, index).reshape({-1, x.size(2)});
  }
  return RowsAt::apply(x.contiguous(), positions.contiguous());
}

}  // namespace headroom
