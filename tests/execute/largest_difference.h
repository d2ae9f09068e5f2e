#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace headroom::testing {

/// The largest |a - b| of any element, each tensor's in units of the largest element of its b.
inline double largest_difference(const std::vector<at::Tensor>& a,
                                 const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1e-30, b[i].abs().max().item<double>());
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return largest;
}

}  // namespace headroom::testing
