#include "ops/lean_operators.h"

#include <headroom/memory/meter.h>
#include "memory/shape_meter.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using ProductOfTensors = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// Values and gradients of two products of the same tensors, bit by bit.
void expect_same_product(const ProductOfTensors& ours, const ProductOfTensors& theirs,
                         const std::vector<at::Tensor>& given,
                         const std::function<at::Tensor(const at::Tensor&)>& layout,
                         const std::string& what) {
  std::vector<std::vector<at::Tensor>> leaves(2);
  std::vector<at::Tensor> results;
  at::Tensor gradient;
  for (int i = 0; i < 2; ++i) {
    std::vector<at::Tensor> arguments;
    for (const at::Tensor& tensor : given) {
      leaves[i].push_back(tensor.detach().clone().requires_grad_());
      arguments.push_back(arguments.empty() ? layout(leaves[i].back()) : leaves[i].back());
    }
    results.push_back((i == 0 ? ours : theirs)(arguments));
    if (i == 0) gradient = torch::randn_like(results[0]);
    results[static_cast<std::size_t>(i)].backward(gradient);
  }
  EXPECT_TRUE(results[0].equal(results[1])) << what;
  EXPECT_EQ(results[0].strides(), results[1].strides()) << what;
  for (std::size_t k = 0; k < given.size(); ++k)
    EXPECT_TRUE(leaves[0][k].grad().equal(leaves[1][k].grad())) << what << ", gradient " << k;
}

at::Tensor (*const kAsItIs)(const at::Tensor&) = [](const at::Tensor& x) { return x; };

TEST(LeanLinear, HasTheBitsOfLibTorch) {
  torch::manual_seed(1);
  const ProductOfTensors ours = [](const auto& t) {
    return lean_linear(t[0], t[1], t.size() > 2 ? t[2] : at::Tensor());
  };
  const ProductOfTensors theirs = [](const auto& t) {
    return t.size() > 2 ? at::linear(t[0], t[1], t[2]) : at::linear(t[0], t[1]);
  };
  const auto transposed = [](const at::Tensor& x) { return x.transpose(0, 1); };
  const auto permuted = [](const at::Tensor& x) { return x.permute({0, 2, 1, 3}); };
  for (const std::int64_t width : {7, 96, 400}) {
    const at::Tensor weight = torch::randn({33, width}), bias = torch::randn({33});
    for (const bool has_bias : {true, false}) {
      const auto arguments = [&](at::IntArrayRef sizes) {
        std::vector<at::Tensor> tensors{torch::randn(sizes), weight};
        if (has_bias) tensors.push_back(bias);
        return tensors;
      };
      const std::string what = std::to_string(width) + (has_bias ? " with bias" : "");
      expect_same_product(ours, theirs, arguments({19, width}), kAsItIs, what + ", matrix");
      expect_same_product(ours, theirs, arguments({5, 9, width}), kAsItIs, what + ", batch");
      expect_same_product(ours, theirs, arguments({5, 9, width}), transposed,
                          what + ", transposed batch");
      expect_same_product(ours, theirs, arguments({3, 4, 5, width}), kAsItIs, what + ", images");
      expect_same_product(ours, theirs, arguments({3, 4, 5, width}), permuted,
                          what + ", permuted images");
    }
  }
}

TEST(LeanMatmul, HasTheBitsOfLibTorch) {
  torch::manual_seed(2);
  const ProductOfTensors ours = [](const auto& t) { return lean_matmul(t[0], t[1]); };
  const ProductOfTensors theirs = [](const auto& t) { return at::matmul(t[0], t[1]); };
  const auto heads = [](const at::Tensor& x) { return x.permute({0, 2, 1, 3}); };
  expect_same_product(ours, theirs, {torch::randn({6, 11, 8}), torch::randn({6, 8, 13})}, kAsItIs,
                      "batch");
  expect_same_product(ours, theirs, {torch::randn({2, 11, 3, 8}), torch::randn({2, 3, 8, 13})},
                      heads, "heads");
  expect_same_product(ours, theirs, {torch::randn({2, 3, 11, 8}), torch::randn({8, 13})}, kAsItIs,
                      "a matrix for all");
  expect_same_product(ours, theirs, {torch::randn({11, 8}), torch::randn({8, 13})}, kAsItIs,
                      "matrices");
}

TEST(LeanProducts, KeepWhatTheyAreGiven) {
  MemoryMeter& meter = MemoryMeter::instance();
  const at::Tensor x = torch::randn({64, 16, 32}).requires_grad_();
  const at::Tensor weight = torch::randn({8, 32}).requires_grad_();
  const at::Tensor heads = torch::randn({4, 16, 8, 32}).requires_grad_();
  const std::int64_t before = meter.live_bytes();
  const at::Tensor y = lean_linear(x.transpose(0, 1), weight, {});
  const at::Tensor scores = lean_matmul(heads.transpose(1, 2), heads.permute({0, 2, 3, 1}));
  const auto made = static_cast<std::int64_t>(y.nbytes() + scores.nbytes());
  EXPECT_LE(meter.live_bytes() - before, made + 1024);
}

// The peak of a backward above what is there before it.
std::int64_t backward_peak(const at::Tensor& y, const at::Tensor& gradient) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  y.backward(gradient);
  return meter.peak_bytes() - before;
}

TEST(LeanLinear, LetsGoOfItsInputBeforeItMakesItsGradient) {
  MemoryMeter::instance();
  const at::Tensor leaf = torch::randn({1, 64}).requires_grad_();
  const at::Tensor weight = torch::randn({64, 64}).requires_grad_();
  weight.mutable_grad() = torch::zeros_like(weight);
  at::Tensor y, gradient;
  std::int64_t x_bytes = 0;
  {
    const at::Tensor x = leaf.expand({4096, 64}).contiguous();
    x_bytes = static_cast<std::int64_t>(x.nbytes());
    y = lean_linear(x, weight, {});
    gradient = torch::randn_like(y);
  }
  EXPECT_LT(backward_peak(y, gradient), x_bytes / 2);
}

TEST(LeanConvolution, HasTheBitsOfLibTorch) {
  torch::manual_seed(3);
  struct Convolution {
    std::vector<std::int64_t> x, weight, stride, padding, dilation;
    std::int64_t groups;
  };
  const std::vector<Convolution> convolutions{
      {{2, 6, 9, 8}, {10, 6, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1},
      {{3, 8, 11, 11}, {16, 8, 1, 1}, {2, 2}, {0, 0}, {1, 1}, 1},
      {{2, 12, 9, 9}, {12, 1, 5, 5}, {2, 1}, {2, 2}, {1, 1}, 12},
      {{2, 4, 16, 16}, {6, 2, 3, 3}, {1, 1}, {2, 2}, {2, 2}, 2},
      {{4, 5, 30}, {7, 5, 4}, {3}, {1}, {1}, 1},
      {{1, 3, 6, 7, 8}, {4, 3, 2, 2, 2}, {1, 1, 1}, {0, 1, 0}, {1, 1, 1}, 1}};
  for (const Convolution& each : convolutions) {
    for (const bool has_bias : {true, false}) {
      const auto convolve = [&](const auto& t, bool is_ours) {
        const at::Tensor bias = has_bias ? t[2] : at::Tensor();
        return is_ours ? lean_convolution(t[0], t[1], bias, each.stride, each.padding,
                                          each.dilation, each.groups)
                       : at::convolution(t[0], t[1], bias, each.stride, each.padding, each.dilation,
                                         false, std::vector<std::int64_t>(each.stride.size()),
                                         each.groups);
      };
      std::vector<at::Tensor> given{torch::randn(each.x), torch::randn(each.weight)};
      if (has_bias) given.push_back(torch::randn({each.weight[0]}));
      const std::string what = c10::str(each.x, " ", each.weight, has_bias ? " with bias" : "");
      for (const auto& layout : {kAsItIs, +[](const at::Tensor& x) {
                                   return x.transpose(-1, -2).contiguous().transpose(-1, -2);
                                 }})
        expect_same_product([&](const auto& t) { return convolve(t, true); },
                            [&](const auto& t) { return convolve(t, false); }, given, layout, what);
      // The gradient of a mean is one number in many places.
      expect_same_product([&](const auto& t) { return convolve(t, true).sum(-1); },
                          [&](const auto& t) { return convolve(t, false).sum(-1); }, given, kAsItIs,
                          what + ", summed");
    }
  }
}

// Of tensors large enough to be brought into oneDNN's layouts where they are.
struct LargeConvolution {
  std::vector<std::int64_t> x, weight;
  std::int64_t stride = 1, padding = 0, groups = 1;

  at::Tensor run(const at::Tensor& input, const at::Tensor& filters) const {
    return lean_convolution(input, filters, {}, {stride, stride}, {padding, padding}, {1, 1},
                            groups);
  }
  at::Tensor run_by_libtorch(const at::Tensor& input, const at::Tensor& filters) const {
    return at::conv2d(input, filters, {}, stride, padding, 1, groups);
  }
};

const std::vector<LargeConvolution> kLargeConvolutions{{{5, 32, 64, 64}, {32, 32, 3, 3}, 1, 1},
                                                       {{16, 64, 32, 32}, {96, 64, 1, 1}},
                                                       {{4, 48, 96, 80}, {48, 1, 3, 3}, 2, 1, 48},
                                                       {{9, 20, 64, 64}, {33, 20, 3, 3}, 1, 1},
                                                       {{1, 64, 96, 96}, {32, 64, 3, 3}, 2, 1}};

TEST(LeanConvolution, HasTheBitsOfLibTorchAlsoInPlace) {
  torch::manual_seed(7);
  for (const LargeConvolution& each : kLargeConvolutions) {
    // What nobody else holds, as between the operators of a model.
    const auto own = [](const at::Tensor& x) { return x * 1; };
    expect_same_product([&](const auto& t) { return own(each.run(t[0], t[1])); },
                        [&](const auto& t) { return own(each.run_by_libtorch(t[0], t[1])); },
                        {torch::randn(each.x), torch::randn(each.weight)}, own, c10::str(each.x));
  }
}

TEST(LeanConvolution, LeavesWhatOthersHoldAsItIs) {
  torch::manual_seed(8);
  const LargeConvolution& each = kLargeConvolutions.front();
  const at::Tensor leaf = torch::randn(each.x).requires_grad_();
  const at::Tensor weight = torch::randn(each.weight).requires_grad_();
  const at::Tensor x = leaf * 1, view = x.narrow(0, 0, 2), before = x.detach().clone();
  const at::Tensor y = each.run(x, weight);
  const at::Tensor dy = torch::randn_like(y), dy_before = dy.clone();
  y.backward(dy);
  EXPECT_TRUE(x.equal(before));
  EXPECT_TRUE(view.equal(before.narrow(0, 0, 2)));
  EXPECT_TRUE(dy.equal(dy_before));
}

// The peaks of forward, and of backward with gradients of x and weight, above what is there before.
std::pair<std::int64_t, std::int64_t> peaks_of(const LargeConvolution& each, bool is_lean) {
  MemoryMeter& meter = MemoryMeter::instance();
  const at::Tensor leaf = torch::randn({1}).requires_grad_();
  const at::Tensor weight = torch::randn(each.weight).requires_grad_();
  weight.mutable_grad() = torch::zeros_like(weight);
  at::Tensor x = leaf.expand(each.x).contiguous();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  at::Tensor y = is_lean ? each.run(x, weight) : each.run_by_libtorch(x, weight);
  const std::int64_t forward = meter.peak_bytes() - before;
  x.reset();
  at::Tensor loss = y.sum();
  y.reset();
  meter.reset_peak();
  const std::int64_t live = meter.live_bytes();
  loss.backward();
  return {forward, meter.peak_bytes() - live};
}

TEST(LeanConvolution, HoldsNoCopiesInOtherLayouts) {
  MemoryMeter::instance();
  const LargeConvolution each{{8, 32, 64, 64}, {32, 32, 3, 3}, 1, 1};
  const auto x_bytes = static_cast<std::int64_t>(8 * 32 * 64 * 64 * sizeof(float));
  const auto [forward, backward] = peaks_of(each, true);
  const auto [their_forward, their_backward] = peaks_of(each, false);
  EXPECT_LE(forward, their_forward);
  // Beside x and the gradient of y LibTorch holds a copy of both, then one of two gradients.
  EXPECT_LE(backward, their_backward - x_bytes * 3 / 2);
}

// The peaks of forward and of backward, with all gradients, by one of the two meters.
template <class Meter>
std::pair<std::int64_t, std::int64_t> metered_peaks(Meter& meter, const LargeConvolution& each,
                                                    const at::Device& device) {
  const auto make = [&](const std::vector<std::int64_t>& sizes) {
    return torch::zeros(sizes, torch::device(device)).requires_grad_();
  };
  const at::Tensor leaf = make(each.x), weight = make(each.weight);
  at::Tensor x = leaf.clone();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  const at::Tensor y = each.run(x, weight);
  const std::int64_t forward = meter.peak_bytes() - before;
  x.reset();
  at::Tensor dy = torch::empty_like(y, torch::device(device));
  meter.reset_peak();
  const std::int64_t live = meter.live_bytes();
  torch::autograd::grad({y}, {leaf, weight}, {dy});
  return {forward, meter.peak_bytes() - live};
}

TEST(LeanConvolution, HasTheSamePeaksWithoutMemory) {
  MemoryMeter& meter = MemoryMeter::instance();
  ShapeMeter& shapes = ShapeMeter::instance();
  const CountOnlyScope count_only;
  std::vector<LargeConvolution> convolutions = kLargeConvolutions;
  for (const LargeConvolution& small : {LargeConvolution{{2, 3, 64, 64}, {16, 3, 3, 3}, 2, 1},
                                        LargeConvolution{{1, 64, 32, 32}, {64, 64, 3, 3}, 1, 1},
                                        LargeConvolution{{2, 64, 32, 32}, {256, 64, 3, 3}, 1, 1}})
    convolutions.push_back(small);
  for (const LargeConvolution& each : convolutions) {
    metered_peaks(meter, each, at::kCPU);  // the first run of a shape pays for setting up kernels
    EXPECT_EQ(metered_peaks(meter, each, at::kCPU), metered_peaks(shapes, each, at::kMeta))
        << c10::str(each.x);
  }
}

TEST(LeanConvolution, TakesASampleWithoutABatch) {
  const at::Tensor x = torch::randn({3, 8, 8}), weight = torch::randn({4, 3, 3, 3});
  EXPECT_TRUE(lean_convolution(x, weight, {}, {1, 1}, {1, 1}, {1, 1}, 1)
                  .equal(at::conv2d(x, weight, {}, 1, 1)));
}

TEST(LeanProducts, MayBeDifferentiatedAgainWhereTheGraphIsKept) {
  torch::manual_seed(6);
  const at::Tensor x = torch::randn({2, 3, 8, 8}).requires_grad_();
  const at::Tensor weight = torch::randn({4, 3, 3, 3}).requires_grad_();
  const at::Tensor y = lean_convolution(x * 1, weight, {}, {1, 1}, {1, 1}, {1, 1}, 1);
  const at::Tensor dy = torch::randn_like(y);
  y.backward(dy, /*retain_graph=*/true);
  const at::Tensor once = weight.grad().clone();
  y.backward(dy);
  EXPECT_TRUE(weight.grad().equal(once + once));
  EXPECT_THROW(y.backward(dy), c10::Error) << "nothing is kept any longer";
}

TEST(LeanMean, HasTheBitsOfLibTorchAndKeepsNothing) {
  torch::manual_seed(4);
  for (const std::vector<std::int64_t>& dims :
       {std::vector<std::int64_t>{-1}, {2, 3}, {3, 1}, {0, 1, 2, 3}}) {
    for (const bool keepdim : {true, false}) {
      expect_same_product([&](const auto& t) { return lean_mean(t[0], dims, keepdim); },
                          [&](const auto& t) { return at::mean(t[0], dims, keepdim); },
                          {torch::randn({3, 5, 7, 9})}, kAsItIs, c10::str(dims, keepdim));
    }
  }
  MemoryMeter& meter = MemoryMeter::instance();
  const at::Tensor leaf = torch::randn({1, 64}).requires_grad_();
  const std::int64_t before = meter.live_bytes();
  const at::Tensor y = lean_mean(leaf.expand({4096, 64}).contiguous(), {0}, false);
  EXPECT_LT(meter.live_bytes() - before, 4096);
}

TEST(LeanProducts, FrozenArgumentsGetNoGradient) {
  const at::Tensor x = torch::randn({6, 5}).requires_grad_();
  const at::Tensor weight = torch::randn({4, 5});
  lean_linear(x, weight, {}).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
}

}  // namespace
}  // namespace headroom
