#include "ops/batch_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace headroom {
namespace {

struct Norm {
  torch::Tensor weight, bias, running_mean, running_var;
};

Norm make_norm(std::int64_t num_channels, bool affine, bool tracks, const torch::Dtype type) {
  const auto options = torch::dtype(type);
  Norm norm;
  if (affine) {
    norm.weight = torch::randn(num_channels, options).requires_grad_();
    norm.bias = torch::randn(num_channels, options).requires_grad_();
  }
  if (tracks) {
    norm.running_mean = torch::randn(num_channels, options);
    norm.running_var = torch::rand(num_channels, options);
  }
  return norm;
}

Norm copy_of(const Norm& norm) {
  const auto copy = [](const torch::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  };
  return {copy(norm.weight), copy(norm.bias), copy(norm.running_mean), copy(norm.running_var)};
}

// By bits: NaN is equal to itself.
void expect_same(const torch::Tensor& one, const torch::Tensor& other, const std::string& what) {
  ASSERT_EQ(one.defined(), other.defined()) << what;
  if (!one.defined()) return;
  ASSERT_EQ(one.sizes(), other.sizes()) << what;
  EXPECT_TRUE(torch::allclose(one, other, 0, 0, /*equal_nan=*/true)) << what;
  EXPECT_TRUE(torch::signbit(one.nan_to_num()).equal(torch::signbit(other.nan_to_num()))) << what;
}

constexpr double kMomentum = 0.3, kEps = 1e-3;

// Output, running statistics, gradients, and the output again.
void compare(const torch::Tensor& input, const Norm& norm, const std::string& what, bool relu) {
  const Norm other = copy_of(norm);
  const torch::Tensor x = input.detach().clone().requires_grad_();
  const torch::Tensor other_x = input.detach().clone().requires_grad_();
  const BatchNormOutputs ours = batch_norm(x, norm.weight, norm.bias, norm.running_mean,
                                           norm.running_var, kMomentum, kEps, relu);
  torch::Tensor theirs = torch::batch_norm(other_x, other.weight, other.bias, other.running_mean,
                                           other.running_var, true, kMomentum, kEps, false);
  if (relu) theirs = theirs.relu_();
  expect_same(ours.y, theirs, what + ": y");
  EXPECT_EQ(ours.y.strides(), theirs.strides()) << what;
  expect_same(norm.running_mean, other.running_mean, what + ": running_mean");
  expect_same(norm.running_var, other.running_var, what + ": running_var");
  EXPECT_FALSE(ours.mean.requires_grad());
  const Norm before = copy_of(norm);
  expect_same(batch_norm_again(x, norm.weight, norm.bias, norm.running_mean, norm.running_var,
                               ours.mean, ours.rstd, kEps, relu),
              theirs, what + ": y again");
  expect_same(norm.running_mean, before.running_mean, what + ": running_mean after y again");
  const torch::Tensor dy = torch::randn_like(theirs);
  ours.y.backward(dy);
  theirs.backward(dy);
  expect_same(x.grad(), other_x.grad(), what + ": gradient of x");
  if (norm.weight.defined()) {
    expect_same(norm.weight.grad(), other.weight.grad(), what + ": gradient of the weight");
    expect_same(norm.bias.grad(), other.bias.grad(), what + ": gradient of the bias");
  }
}

void compare(const torch::Tensor& input, const Norm& norm, const std::string& what) {
  compare(input, copy_of(norm), what, /*relu=*/false);
  compare(input, copy_of(norm), what + " and ReLU", /*relu=*/true);
}

std::vector<std::vector<std::int64_t>> shapes() {
  std::vector<std::vector<std::int64_t>> all{{4, 3},       {1, 5, 2},       {2, 8, 1, 1},
                                             {3, 7, 1, 9}, {2, 64, 17},     {5, 33, 6, 6},
                                             {1, 1, 3, 3}, {2, 3, 4, 5, 6}, {8, 16, 32, 32}};
  for (std::int64_t side = 1; side <= 9; ++side) all.push_back({2, 9, side, 5});
  for (std::int64_t channels = 1; channels <= 18; ++channels) all.push_back({3, channels, 7});
  return all;
}

TEST(BatchNorm, HasTheBitsOfLibTorch) {
  torch::manual_seed(1);
  for (const std::vector<std::int64_t>& sizes : shapes()) {
    for (const bool affine : {true, false}) {
      for (const bool tracks : {true, false}) {
        const Norm norm = make_norm(sizes[1], affine, tracks, torch::kFloat);
        compare(3 * torch::randn(sizes) + 1, norm, c10::str(sizes, " ", affine, " ", tracks));
      }
    }
  }
}

TEST(BatchNorm, HasTheBitsOfLibTorchForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const int num_threads : {1, 2, 3}) {
    at::set_num_threads(num_threads);
    torch::manual_seed(2);
    compare(torch::randn({4, 37, 19, 5}), make_norm(37, true, true, torch::kFloat),
            c10::str(num_threads, " threads"));
  }
  at::set_num_threads(before);
}

TEST(BatchNorm, LeavesOtherLayoutsAndTypesToLibTorch) {
  torch::manual_seed(3);
  const torch::Tensor x = torch::randn({3, 6, 5, 5});
  compare(x.contiguous(torch::MemoryFormat::ChannelsLast), make_norm(6, true, true, torch::kFloat),
          "channels last");
  compare(x.transpose(2, 3), make_norm(6, true, true, torch::kFloat), "transposed");
  compare(x.to(torch::kDouble), make_norm(6, true, true, torch::kDouble), "double");
  Norm strided = make_norm(6, true, true, torch::kFloat);
  strided.weight = torch::randn({6, 2}).select(1, 0).detach().requires_grad_();
  const torch::Tensor y = batch_norm(x, strided.weight, strided.bias, strided.running_mean.clone(),
                                     strided.running_var.clone(), kMomentum, kEps)
                              .y;
  expect_same(y,
              torch::batch_norm(x, strided.weight, strided.bias, strided.running_mean,
                                strided.running_var, true, kMomentum, kEps, false),
              "a weight with gaps");
}

// Two norms with a ReLU behind each, whose gradients `join` decides about.
void compare_pair(
    const std::string& what,
    const std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>& join) {
  torch::manual_seed(5);
  const Norm norm = make_norm(11, true, true, torch::kFloat);
  const torch::Tensor one = torch::randn({3, 11, 6, 5}), other = torch::randn({3, 11, 6, 5});
  const torch::Tensor weights = torch::randn_like(join(one, other));
  std::vector<std::vector<torch::Tensor>> gradients;
  for (const bool is_ours : {true, false}) {
    const Norm copy = copy_of(norm);
    std::vector<torch::Tensor> inputs, outputs;
    for (const torch::Tensor& given : {one, other}) {
      inputs.push_back(given.clone().requires_grad_());
      outputs.push_back(
          is_ours ? batch_norm(inputs.back(), copy.weight, copy.bias, copy.running_mean,
                               copy.running_var, kMomentum, kEps, true)
                        .y
                  : torch::batch_norm(inputs.back(), copy.weight, copy.bias, copy.running_mean,
                                      copy.running_var, true, kMomentum, kEps, false)
                        .relu_());
    }
    (join(outputs[0], outputs[1]) * weights).sum().backward();
    gradients.push_back({inputs[0].grad(), inputs[1].grad(), copy.weight.grad(), copy.bias.grad()});
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    expect_same(gradients[0][i], gradients[1][i], what + c10::str(", gradient ", i));
}

TEST(BatchNorm, WritesOverGradientsOnlyWhereNobodyElseReadsThem) {
  compare_pair("one gradient for two", [](const auto& a, const auto& b) { return a + b; });
  compare_pair("one each", [](const auto& a, const auto& b) { return a * b; });
  compare_pair("parts of one", [](const auto& a, const auto& b) { return torch::cat({a, b}, 1); });
  compare_pair("samples of one", [](const auto& a, const auto& b) { return torch::cat({a, b}); });
  compare_pair("turned", [](const auto& a, const auto& b) { return a.transpose(2, 3) + b.mT(); });
  compare_pair("one number", [](const auto& a, const auto& b) { return a.mean({2, 3}) + b.sum(); });
}

TEST(BatchNorm, TakesExtremeValuesAsLibTorchDoes) {
  torch::manual_seed(4);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {0.0f, 1e-38f, 1e20f, infinity, std::nanf("")}) {
    torch::Tensor x = torch::randn({2, 9, 6, 3});
    x.select(1, 4).fill_(value);
    x.select(1, 7).select(0, 0).fill_(value);
    compare(x, make_norm(9, true, true, torch::kFloat), c10::str("values of ", value));
  }
}

// What this build is expected to be fast with; elsewhere LibTorch's own kernels run.
TEST(BatchNorm, IsReproducedByOurKernelsOnACpuWithFusedProducts) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      std::getenv("ATEN_CPU_CAPABILITY") != nullptr) {
    GTEST_SKIP() << "this CPU, or its setting, has no fused products";
  }
  EXPECT_TRUE(reproduces_batch_norm());
}

TEST(BatchNorm, GivesNoGradientOfAGradient) {
  const torch::Tensor x = torch::randn({2, 3, 4}, torch::requires_grad());
  const torch::Tensor y = batch_norm(x, {}, {}, {}, {}, kMomentum, kEps).y;
  EXPECT_THROW(torch::autograd::grad({y.square().sum()}, {x}, {}, true, true), c10::Error);
}

}  // namespace
}  // namespace headroom
