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

struct RowsAt : torch::autograd::Function<RowsAt> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& positions) {
    const std::int64_t length = x.size(1), width = x.size(2), per_sample = positions.size(1);
    at::Tensor rows = ops::make_floats({positions.numel(), width}, x);
    ctx->save_for_backward({positions});
    ctx->saved_data["length"] = length;
    if (x.is_meta()) return rows;
    const std::int64_t* position = positions.data_ptr<std::int64_t>();
    const float* from = x.data_ptr<float>();
    float* to = rows.data_ptr<float>();
    parallel_for(0, positions.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(to + i * width, from + (i / per_sample * length + position[i]) * width,
                    static_cast<std::size_t>(width) * sizeof(float));
      }
    });
    return rows;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("rows_at");
    const at::Tensor positions = ctx->get_saved_variables()[0], drows = grads[0].contiguous();
    const std::int64_t num_samples = positions.size(0), per_sample = positions.size(1),
                       length = ctx->saved_data["length"].toInt();
    const std::int64_t width = drows.size(1);
    at::Tensor dx = ops::make_floats({num_samples, length, width}, drows);
    if (dx.is_meta()) return {dx, {}};
    const std::int64_t* position = positions.data_ptr<std::int64_t>();
    const float* from = drows.data_ptr<float>();
    float* to = dx.data_ptr<float>();
    // A position may be there twice: one thread has all of a sample.
    parallel_for(0, num_samples, 1, [&](std::int64_t begin, std::int64_t end) {
      std::memset(to + begin * length * width, 0,
                  static_cast<std::size_t>((end - begin) * length * width) * sizeof(float));
      for (std::int64_t i = begin * per_sample; i < end * per_sample; ++i) {
        float* row = to + (i / per_sample * length + position[i]) * width;
        for (std::int64_t j = 0; j < width; ++j) row[j] += from[i * width + j];
      }
    });
    return {dx, {}};
  }
};

}  // namespace

at::Tensor rows_at(const at::Tensor& input, const at::Tensor& positions) {
  const at::Tensor x = ops::as_kernel_input(input);
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
