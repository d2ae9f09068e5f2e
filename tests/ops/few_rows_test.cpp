// Linear layers with few rows, which our own products compute: against the same in double, in every
// size around those of tiles and vectors, on every instruction set, for any number of threads.

#include "ops/few_rows.h"
#include <headroom/memory/meter.h>
#include "ops/direct_gradient.h"
#include "ops/kernels.h"
#include "ops/linear.h"

#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <torch/torch.h>

#include <limits>
#include <random>

namespace headroom {
namespace {

using reference::difference;
using torch::Tensor;
using Inputs = std::vector<Tensor>;

struct Sizes {
  std::int64_t rows, in, out;
};

std::ostream& operator<<(std::ostream& stream, const Sizes& sizes) {
  return stream << sizes.rows << " rows, " << sizes.in << " in, " << sizes.out << " out";
}

// x, weight, bias: small multiples of 1/4, whose products and sums float has without rounding.
Inputs whole_inputs(const Sizes& sizes) {
  const auto draw = [](std::vector<std::int64_t> shape) {
    return torch::randint(-4, 5, shape).to(torch::kFloat) / 4;
  };
  return {draw({sizes.rows, sizes.in}), draw({sizes.out, sizes.in}), draw({sizes.out})};
}

Tensor linear_with_bias(const Inputs& in) { return linear(in[0], in[1], in[2]); }
Tensor linear_relu_with_bias(const Inputs& in) { return linear_relu(in[0], in[1], in[2]); }
Tensor reference_linear(const Inputs& in) { return torch::linear(in[0], in[1], in[2]); }
Tensor reference_linear_relu(const Inputs& in) { return torch::relu(reference_linear(in)); }

// Output and gradients of a function whose results are not rounded, in any order of sums.
Inputs run_whole(const reference::Function& function, const Inputs& inputs,
                 torch::ScalarType type) {
  Inputs leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.to(type).clone().requires_grad_(true));
  const Tensor out = function(leaves);
  out.backward((torch::arange(out.numel()) % 7 - 3).to(type).reshape(out.sizes()));
  Inputs results{out.detach()};
  for (const Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

void expect_without_rounding(const Sizes& sizes) {
  SCOPED_TRACE(::testing::Message() << sizes);
  const Inputs inputs = whole_inputs(sizes);
  ASSERT_TRUE(ops::has_few_rows(inputs[0], inputs[1]));
  for (const bool relu : {false, true}) {
    const Inputs actual =
        run_whole(relu ? linear_relu_with_bias : linear_with_bias, inputs, torch::kFloat);
    const Inputs expected =
        run_whole(relu ? reference_linear_relu : reference_linear, inputs, torch::kDouble);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(actual[i].to(torch::kDouble), expected[i])) << i << " " << relu;
  }
}

TEST(FewRows, AreEveryProductWithoutRoundingInEveryOddSize) {
  torch::manual_seed(1);
  for (std::int64_t rows = 3; rows <= kernels::kMostFewRows; ++rows)
    expect_without_rounding({rows, 37, 29});
  for (const std::int64_t in : {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 49, 64, 65})
    expect_without_rounding({7, in, 14});
  for (const std::int64_t out : {1, 2, 5, 6, 7, 11, 12, 13, 24, 25, 31, 32, 33, 63, 65})
    expect_without_rounding({18, 21, out});
  // Sums that are made in parts: over the columns of x, and over those of dy.
  for (const std::int64_t rows : {3, 16, 17, 32, 33, 64}) {
    expect_without_rounding({rows, 1027, 13});
    expect_without_rounding({rows, 19, 1027});
  }
  std::mt19937 random(2);
  const auto draw = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(most));
  };
  for (int i = 0; i < 60; ++i) expect_without_rounding({2 + draw(62), draw(300), draw(300)});
}

TEST(FewRows, RoundNoMoreThanABlas) {
  torch::manual_seed(3);
  for (const Sizes& s : {Sizes{16, 784, 512}, Sizes{3, 2100, 40}, Sizes{64, 300, 1500}}) {
    SCOPED_TRACE(::testing::Message() << s);
    reference::FloatErrors errors;
    for (int i = 0; i < 4; ++i) {
      const Inputs inputs = {torch::randn({s.rows, s.in}), torch::randn({s.out, s.in}),
                             torch::randn({s.out})};
      errors.add(linear_with_bias, reference_linear, inputs);
    }
    for (std::size_t i = 0; i < errors.ours.size(); ++i) {
      EXPECT_LE(errors.ours[i], 4 * 3e-6) << i;
      EXPECT_LE(errors.ours[i], 2 * errors.plain[i] + 1e-7) << i;
    }
  }
}

TEST(FewRows, AreTheSameBitsForAnyNumberOfThreads) {
  torch::manual_seed(4);
  const int before = at::get_num_threads();
  for (const Sizes& s : {Sizes{16, 784, 512}, Sizes{5, 1100, 700}, Sizes{61, 515, 333}}) {
    const Inputs inputs = {torch::randn({s.rows, s.in}), torch::randn({s.out, s.in}),
                           torch::randn({s.out})};
    at::set_num_threads(1);
    const Inputs alone = reference::run(linear_relu_with_bias, inputs, torch::kFloat);
    for (const int threads : {2, 3, 5}) {
      at::set_num_threads(threads);
      const Inputs together = reference::run(linear_relu_with_bias, inputs, torch::kFloat);
      EXPECT_TRUE(reference::same_bits(alone, together)) << s << ", " << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

TEST(FewRows, AreEveryProductOnEveryTarget) {
  torch::manual_seed(5);
  std::int64_t disabled = 0;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::DisableTargets(disabled);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    for (const std::int64_t rows : {3, 5, 8, 13, 16, 27, 40, 64})
      expect_without_rounding({rows, 70 + rows, 45});
    expect_without_rounding({9, 1030, 520});
    disabled |= target;
  }
  hwy::DisableTargets(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(FewRows, AddToTheGradientThatIsThere) {
  torch::manual_seed(6);
  const Inputs inputs = whole_inputs({16, 50, 40});
  Inputs leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.clone().requires_grad_(true));
  const DirectGradientScope scope([](const Tensor& parameter) {
    return torch::full_like(parameter, std::numeric_limits<float>::quiet_NaN());
  });
  for (int i = 0; i < 3; ++i) linear_with_bias(leaves).sum().backward();
  const Inputs once = [&] {
    Inputs fresh;
    for (const Tensor& input : inputs)
      fresh.push_back(input.to(torch::kDouble).requires_grad_(true));
    reference_linear(fresh).sum().backward();
    return fresh;
  }();
  for (std::size_t i = 0; i < leaves.size(); ++i)
    EXPECT_TRUE(torch::equal(leaves[i].grad().to(torch::kDouble), 3 * once[i].grad())) << i;
}

TEST(FewRows, KeepWhatIsNotANumber) {
  Inputs inputs = whole_inputs({4, 20, 13});
  inputs[0][2][5] = std::numeric_limits<float>::quiet_NaN();
  const Tensor y = linear_relu_with_bias(inputs);
  EXPECT_TRUE(y[2].isnan().all().item<bool>());
  EXPECT_FALSE(y[1].isnan().any().item<bool>());
}

TEST(FewRows, TakeTensorsThatAreNotContiguous) {
  torch::manual_seed(7);
  const Tensor x = torch::randn({20, 9}), weight = torch::randn({11, 20});
  const Tensor got = linear(x.t(), weight, Tensor());
  EXPECT_LE(difference(got, torch::mm(x.t(), weight.t())), 1e-6);
  // The gradient of a sum is one number, seen as a matrix.
  const Tensor leaf = weight.clone().requires_grad_(true);
  linear(x.t(), leaf, Tensor()).sum().backward();
  EXPECT_LE(difference(leaf.grad(), x.sum(1).expand({11, 20})), 1e-6);
}

TEST(FewRows, PassThroughTheMetaDevice) {
  Inputs inputs;
  for (const Tensor& input : whole_inputs({16, 50, 40}))
    inputs.push_back(torch::empty(input.sizes(), torch::kMeta).requires_grad_(true));
  const Tensor out = linear_relu_with_bias(inputs);
  out.backward(torch::empty_like(out));
  for (const Tensor& input : inputs) EXPECT_EQ(input.grad().sizes(), input.sizes());
}

TEST(FewRows, HoldNoMaskedGradientBesideTheOneThatComesIn) {
  constexpr std::int64_t kRows = 32, kIn = 8, kOut = 4096;
  Inputs inputs{torch::randn({kRows, kIn}), torch::randn({kOut, kIn}), torch::randn({kOut})};
  for (Tensor& input : inputs) {
    input.requires_grad_(true);
    input.mutable_grad() = torch::zeros_like(input);
  }
  const Tensor out = linear_relu_with_bias(inputs), gradient = torch::ones_like(out);
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  out.backward(gradient);
  EXPECT_LT(meter.peak_bytes() - before, kRows * kOut * 4);
}

TEST(FewRows, AreThoseOfSizesAlone) {
  const Tensor weight = torch::zeros({10, 8});
  EXPECT_FALSE(ops::has_few_rows(torch::zeros({2, 8}), weight));
  EXPECT_TRUE(ops::has_few_rows(torch::zeros({3, 8}), weight));
  EXPECT_TRUE(ops::has_few_rows(torch::zeros({64, 8}), weight));
  EXPECT_FALSE(ops::has_few_rows(torch::zeros({65, 8}), weight));
  EXPECT_FALSE(ops::has_few_rows(torch::zeros({16, 8}, torch::kDouble), weight));
}

}  // namespace
}  // namespace headroom
