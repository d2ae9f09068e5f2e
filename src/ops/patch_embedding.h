#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headroom {

struct PatchWeights {
  at::Tensor projection_weight, projection_bias;  ///< (C, channels * patch_size * patch_size), (C)
  at::Tensor class_token;                         ///< (1, 1, C)
  at::Tensor positions;                           ///< (1, T, C), T = patches + 1
};

/// A class token and the patches of each image, projected, with their positions added: images (B,
/// channels, rows, columns) become (B, T, C). Patches go row by row; the values of one are in the
/// order of a convolution's weight. On the CPU in float, autograd keeps nothing but the images,
/// which are in memory anyway; patches exist for one image at a time. Values and gradients do not
/// depend on the number of threads but for the matrix products. Images that require a gradient take
/// LibTorch's own operations. Throws ConfigError when the sizes do not fit.
at::Tensor patch_embedding(const at::Tensor& images, std::int64_t patch_size,
                           const PatchWeights& weights);

}  // namespace headroom
