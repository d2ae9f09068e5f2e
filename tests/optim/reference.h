#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace headroom::testing {

using Shapes = std::vector<std::vector<std::int64_t>>;

/// Two copies of the same parameters, one for each of two optimizers under comparison.
struct ReferencePair {
  std::vector<at::Tensor> ours;
  std::vector<at::Tensor> theirs;

  explicit ReferencePair(const Shapes& shapes) {
    torch::manual_seed(11);
    for (const auto& shape : shapes) {
      const at::Tensor values = torch::randn(shape);
      ours.push_back(values.clone().requires_grad_());
      theirs.push_back(values.clone().requires_grad_());
    }
  }

  /// The same random gradient for both, of a size that differs between parameters and between
  /// steps.
  void give_gradients(int step) {
    torch::manual_seed(1000 + step);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const at::Tensor gradient =
          torch::randn(ours[i].sizes()).mul_(0.01 * static_cast<double>(1 + i) * (1 + step % 7));
      ours[i].mutable_grad() = gradient.clone();
      theirs[i].mutable_grad() = gradient.clone();
    }
  }

  double largest_difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      largest =
          std::max(largest, (ours[i].detach() - theirs[i].detach()).abs().max().item<double>());
    }
    return largest;
  }

  /// Relative to the value, or to 1 for smaller values: what 100 float roundings of a large
  /// parameter leave.
  double largest_relative_difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      const at::Tensor difference =
          (ours[i].detach() - theirs[i].detach()).abs() / theirs[i].detach().abs().clamp_min(1);
      largest = std::max(largest, difference.max().item<double>());
    }
    return largest;
  }

  bool identical() const {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (!torch::equal(ours[i].detach(), theirs[i].detach())) return false;
    }
    return true;
  }
};

/// Sizes that are multiples of no vector length, span several tasks, and have 0 to 4 dimensions.
inline Shapes many_shapes() {
  return {{}, {1}, {7}, {33, 5}, {300, 257}, {16, 3, 3, 3}, {2, 4099}, {0, 4}};
}

/// One thread against three, five updates: expects bit-identical parameters.
template <typename Optimizer, typename... Options>
void expect_independent_of_threads(const Shapes& shapes, const Options&... options) {
  ReferencePair pair(shapes);
  Optimizer ours(pair.ours, options...);
  Optimizer theirs(pair.theirs, options...);
  const int threads = at::get_num_threads();
  for (int step = 0; step < 5; ++step) {
    pair.give_gradients(step);
    at::set_num_threads(1);
    ours.step();
    at::set_num_threads(3);
    theirs.step();
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(pair.identical());
}

}  // namespace headroom::testing
