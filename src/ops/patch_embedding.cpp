#include "ops/patch_embedding.h"

#include "core/parallel.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include <headroom/core/error.h>

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Grid {
  Grid(const at::Tensor& images, std::int64_t patch_size)
      : channels(images.size(1)),
        rows(images.size(2)),
        columns(images.size(3)),
        patch(patch_size) {}
  std::int64_t num_patches() const { return (rows / patch) * (columns / patch); }
  std::int64_t patch_values() const { return channels * patch * patch; }

  std::int64_t channels, rows, columns, patch;
};

// patches (num_patches, patch_values) of image `sample`.
void unfold(const at::Tensor& images, const Grid& grid, std::int64_t sample,
            const at::Tensor& patches) {
  if (images.is_meta()) return;
  const float* image = images.data_ptr<float>() + sample * grid.channels * grid.rows * grid.columns;
  float* out = patches.data_ptr<float>();
  const std::int64_t across = grid.columns / grid.patch, size = grid.patch;
  parallel_for(0, grid.num_patches(), std::max<std::int64_t>(1, 16384 / grid.patch_values()),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t p = begin; p < end; ++p) {
                   float* to = out + p * grid.patch_values();
                   const float* corner =
                       image + p / across * size * grid.columns + p % across * size;
                   for (std::int64_t c = 0; c < grid.channels; ++c) {
                     for (std::int64_t i = 0; i < size; ++i, to += size) {
                       std::memcpy(to, corner + (c * grid.rows + i) * grid.columns,
                                   static_cast<std::size_t>(size) * sizeof(float));
                     }
                   }
                 }
               });
}

// to (T, C) = the positions, plus the class token in the first row and the bias in the others.
void start_sample(const at::Tensor& positions, const at::Tensor& class_token,
                  const at::Tensor& bias, const at::Tensor& to) {
  if (to.is_meta()) return;
  const std::int64_t width = to.size(1);
  const float *from = positions.data_ptr<float>(), *first = class_token.data_ptr<float>();
  const float* others = ops::present(bias) ? bias.data_ptr<float>() : nullptr;
  float* out = to.data_ptr<float>();
  parallel_for(0, to.size(0), 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* added = t == 0 ? first : others;
      for (std::int64_t j = 0; j < width; ++j)
        out[t * width + j] = from[t * width + j] + (added == nullptr ? 0.0f : added[j]);
    }
  });
}

// sums (T, C) = the sum over the samples of d (B, T, C), in their order.
void sum_samples(const at::Tensor& d, const at::Tensor& sums) {
  if (d.is_meta()) return;
  const std::int64_t num_samples = d.size(0), count = sums.numel();
  const float* from = d.data_ptr<float>();
  float* to = sums.data_ptr<float>();
  parallel_for(0, count, 4096, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = 0.0f;
    for (std::int64_t b = 0; b < num_samples; ++b) {
      for (std::int64_t i = begin; i < end; ++i) to[i] += from[b * count + i];
    }
  });
}

void write_or_add(const ops::ParameterGrad& to, const at::Tensor& gradient) {
  if (!to.wanted() || gradient.is_meta()) return;
  const at::Tensor from = gradient.view(to.gradient.sizes());
  if (to.accumulate) {
    at::Tensor(to.gradient).add_(from);
  } else {
    at::Tensor(to.gradient).copy_(from);
  }
}

enum Saved { kImages, kWeight, kBias, kClassToken, kPositions };

struct PatchEmbedding : torch::autograd::Function<PatchEmbedding> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& images,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& class_token, const at::Tensor& positions,
                            std::int64_t patch_size) {
    const Grid grid(images, patch_size);
    const std::int64_t num_samples = images.size(0), num_patches = grid.num_patches(),
                       width = weight.size(0);
    at::Tensor out = ops::make_floats({num_samples, num_patches + 1, width}, images);
    const at::Tensor patches = ops::make_floats({num_patches, grid.patch_values()}, images);
    for (std::int64_t b = 0; b < num_samples; ++b) {
      const at::Tensor rows = out.select(0, b);
      unfold(images, grid, b, patches);
      start_sample(positions, class_token, bias, rows);
      ops::linear(patches, weight, rows.narrow(0, 1, num_patches), 1.0);
    }
    ctx->save_for_backward({images, weight, bias, class_token, positions});
    ctx->saved_data["patch_size"] = patch_size;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("patch_embedding");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &images = saved[kImages], dout = grads[0].contiguous();
    const Grid grid(images, ctx->saved_data["patch_size"].toInt());
    const std::int64_t num_samples = dout.size(0), num_patches = grid.num_patches(),
                       width = dout.size(2);
    variable_list result(6);
    {
      const at::Tensor sums = ops::make_floats({num_patches + 1, width}, dout);
      sum_samples(dout, sums);
      const ops::ParameterGrad dpositions(saved[kPositions], ctx->needs_input_grad(kPositions));
      const ops::ParameterGrad dclass(saved[kClassToken], ctx->needs_input_grad(kClassToken));
      const ops::ParameterGrad dbias(saved[kBias], ctx->needs_input_grad(kBias));
      write_or_add(dpositions, sums);
      write_or_add(dclass, sums.select(0, 0));
      if (dbias.wanted())
        ops::column_sums(sums.narrow(0, 1, num_patches), dbias.gradient, dbias.accumulate);
      result[kPositions] = dpositions.returned;
      result[kClassToken] = dclass.returned;
      result[kBias] = dbias.returned;
    }
    const ops::ParameterGrad dweight(saved[kWeight], ctx->needs_input_grad(kWeight));
    result[kWeight] = dweight.returned;
    if (!dweight.wanted()) return result;
    if (num_samples == 0 && !dweight.accumulate && !dout.is_meta())
      at::Tensor(dweight.gradient).zero_();
    const at::Tensor patches = ops::make_floats({num_patches, grid.patch_values()}, dout);
    for (std::int64_t b = 0; b < num_samples; ++b) {
      unfold(images, grid, b, patches);
      ops::linear_grad_weight(dout.select(0, b).narrow(0, 1, num_patches), patches,
                              dweight.gradient, b == 0 ? dweight.beta() : 1.0);
    }
    return result;
  }
};

at::Tensor plain_patch_embedding(const at::Tensor& images, const Grid& grid,
                                 const PatchWeights& weights) {
  const std::int64_t num_samples = images.size(0), size = grid.patch;
  const at::Tensor rows =
      images
          .reshape({num_samples, grid.channels, grid.rows / size, size, grid.columns / size, size})
          .permute({0, 2, 4, 1, 3, 5})
          .reshape({num_samples, grid.num_patches(), grid.patch_values()});
  const at::Tensor patches =
      ops::plain_linear(rows, weights.projection_weight, weights.projection_bias);
  return at::cat({weights.class_token.expand({num_samples, 1, patches.size(2)})
                      .to(patches.scalar_type()),
                  patches},
                 1) +
         weights.positions;
}

}  // namespace

at::Tensor patch_embedding(const at::Tensor& images, std::int64_t patch_size,
                           const PatchWeights& weights) {
  if (images.dim() != 4 || patch_size < 1 || images.size(2) % patch_size != 0 ||
      images.size(3) % patch_size != 0) {
    throw ConfigError(
        fmt::format("{} dimensions are not (B, channels, rows, columns) with rows and columns of "
                    "whole patches of {}",
                    images.dim(), patch_size));
  }
  const Grid grid(images, patch_size);
  const std::int64_t width = weights.projection_weight.size(0);
  ops::check_sizes(weights.projection_weight, {width, grid.patch_values()}, "projection_weight");
  if (weights.projection_bias.defined())
    ops::check_sizes(weights.projection_bias, {width}, "projection_bias");
  ops::check_sizes(weights.class_token, {1, 1, width}, "class_token");
  ops::check_sizes(weights.positions, {1, grid.num_patches() + 1, width}, "positions");
  if (!ops::has_kernels(images) || ops::is_autocast(images) || images.requires_grad())
    return plain_patch_embedding(images, grid, weights);
  return PatchEmbedding::apply(images.contiguous(), weights.projection_weight.contiguous(),
                               ops::or_empty(weights.projection_bias, images),
                               weights.class_token.contiguous(), weights.positions.contiguous(),
                               patch_size);
}

}  // namespace headroom
