#pragma once

// Convolutions by oneDNN's primitives, which LibTorch runs as well, in less memory. oneDNN reads
// and gives tensors in layouts of its own; LibTorch holds such a copy beside each argument and
// result. Here a tensor that nobody else holds is brought into the other layout where it is.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace headroom::ops {

/// How a convolution moves over its input.
struct Window {
  std::vector<std::int64_t> stride, padding, dilation;
  std::int64_t groups = 1;

  std::vector<std::int64_t> output_padding() const {
    return std::vector<std::int64_t>(stride.size());
  }
};

/// Whether the functions below take a convolution of x (N, C, H, W) by weight (O, C / groups, h,
/// w), on the CPU or the meta device, and give LibTorch's bits: LibTorch would run it by oneDNN in
/// its usual layout, and did what we do in a trial, which is made once, on a few small tensors.
bool has_lean_convolution(const at::Tensor& x, const at::Tensor& weight, const Window& window);

/// y; bias may be undefined.
at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                    const Window& window);

/// Of x, weight and bias; undefined where not wanted.
using ConvolutionGradients = std::array<at::Tensor, 3>;

/// The gradients from that of y. Lets go of x before it makes its gradient.
ConvolutionGradients convolve_backward(at::Tensor dy, at::Tensor x, const at::Tensor& weight,
                                       const Window& window, std::array<bool, 3> wanted);

}  // namespace headroom::ops
