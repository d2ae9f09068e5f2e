// Without oneDNN's headers: LibTorch runs all convolutions.
#include "ops/convolution.h"

#include <c10/util/Exception.h>

namespace headroom::ops {

bool has_lean_convolution(const at::Tensor& /*x*/, const at::Tensor& /*weight*/,
                          const Window& /*window*/) {
  return false;
}

at::Tensor convolve(const at::Tensor& /*x*/, const at::Tensor& /*weight*/,
                    const at::Tensor& /*bias*/, const Window& /*window*/) {
  TORCH_CHECK(false, "this build has no convolutions of its own");
}

ConvolutionGradients convolve_backward(at::Tensor /*dy*/, at::Tensor /*x*/,
                                       const at::Tensor& /*weight*/, const Window& /*window*/,
                                       std::array<bool, 3> /*wanted*/) {
  TORCH_CHECK(false, "this build has no convolutions of its own");
}

}  // namespace headroom::ops
