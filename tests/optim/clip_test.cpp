#include <headroom/optim/optimizer.h>

#include <headroom/core/error.h>

#include <hwy/highway.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace headroom {
namespace {

const double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

double reference_norm(const std::vector<at::Tensor>& gradients) {
  double sum = 0;
  for (const at::Tensor& gradient : gradients)
    sum += gradient.to(torch::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

TEST(GlobalNorm, IsTheNormOfAllGradientsTogether) {
  EXPECT_DOUBLE_EQ(global_norm({torch::full({1}, 3.0), torch::full({1}, 4.0, torch::kDouble)}), 5);
  EXPECT_DOUBLE_EQ(global_norm({}), 0);
  EXPECT_DOUBLE_EQ(global_norm({at::Tensor(), torch::empty({0}), torch::full({4}, 1.0)}), 2);
}

TEST(GlobalNorm, TakesEveryTypeAndLayout) {
  torch::manual_seed(1);
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    const std::vector<at::Tensor> gradients = {
        torch::randn({257, 311}).to(type), torch::randn({40, 30}).to(type).t(),
        torch::randn({100, 9}).to(type).slice(1, 0, 9, 2), torch::randn({3}).to(type)};
    EXPECT_NEAR(global_norm(gradients) / reference_norm(gradients), 1, 1e-12) << type;
  }
}

TEST(GlobalNorm, IsTheSameBitsOnEveryTarget) {
  torch::manual_seed(2);
  for (const std::int64_t size : {1, 7, 8, 9, 31, 1000, 30'001}) {
    const at::Tensor gradient = torch::randn({size}) * 1e20;
    const float* values = gradient.data_ptr<float>();
    std::array<double, 8> sums{};
    const std::int64_t whole = size / 8 * 8;
    for (std::int64_t i = 0; i < whole; ++i)
      sums[static_cast<std::size_t>(i % 8)] += static_cast<double>(values[i]) * values[i];
    for (std::int64_t i = whole; i < size; ++i)
      sums[0] += static_cast<double>(values[i]) * values[i];
    const double expected = std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0));
    std::int64_t disabled = 0;
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      hwy::DisableTargets(disabled);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      EXPECT_EQ(global_norm({gradient}), expected) << size << " " << hwy::TargetName(target);
      disabled |= target;
    }
    hwy::DisableTargets(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
}

TEST(GlobalNorm, TakesSparseGradients) {
  const at::Tensor weight = torch::randn({10, 3}, torch::requires_grad());
  const at::Tensor index = torch::tensor({1, 4, 4, 7});
  torch::embedding(weight, index, -1, false, /*sparse=*/true).pow(2).sum().backward();
  ASSERT_TRUE(weight.grad().is_sparse());
  EXPECT_NEAR(global_norm({weight.grad()}), reference_norm({weight.grad().to_dense()}), 1e-5);
}

TEST(GlobalNorm, IsTheSameBitsFromOneGradientAtATime) {
  torch::manual_seed(3);
  std::vector<at::Tensor> gradients = {torch::randn({70'001}), at::Tensor(), torch::randn({3, 5}),
                                       torch::randn({1'000}).to(torch::kBFloat16)};
  const auto one_by_one = [&] {
    std::vector<SquareSum> sums;
    for (const at::Tensor& gradient : gradients) sums.push_back(square_sum(gradient));
    return norm_of(sums);
  };
  EXPECT_EQ(one_by_one(), global_norm(gradients));
  gradients.push_back(torch::full({2}, 1e200, torch::kDouble));  // its squares overflow
  EXPECT_EQ(one_by_one(), global_norm(gradients));
  EXPECT_TRUE(std::isfinite(one_by_one()));
  gradients[2][1][1] = kInfinity;
  EXPECT_FALSE(std::isfinite(one_by_one()));
}

TEST(GlobalNorm, DoesNotDependOnTheNumberOfThreads) {
  torch::manual_seed(2);
  const std::vector<at::Tensor> gradients = {torch::randn({1'000'003})};
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double one = global_norm(gradients);
  at::set_num_threads(2);
  EXPECT_EQ(global_norm(gradients), one);
  at::set_num_threads(before);
}

TEST(GlobalNorm, DoesNotOverflowWhileGradientsAreFinite) {
  EXPECT_NEAR(global_norm({torch::full({4}, 1e38)}) / 2e38, 1, 1e-6);
  EXPECT_NEAR(global_norm({torch::full({4}, 1e300, torch::kDouble)}) / 2e300, 1, 1e-12);
  EXPECT_FALSE(std::isfinite(global_norm({torch::full({4}, kInfinity)})));
  EXPECT_TRUE(std::isnan(global_norm({torch::ones({4}), torch::full({4}, kNan)})));
}

TEST(ClipGlobalNorm, ScalesToTheNormAndReturnsTheOneBefore) {
  const std::vector<at::Tensor> gradients = {torch::full({1}, 3.0, torch::kDouble),
                                             torch::full({1}, 4.0, torch::kDouble)};
  EXPECT_DOUBLE_EQ(clip_global_norm(gradients, 1.0), 5);
  EXPECT_NEAR(gradients[0].item<double>(), 0.6, 1e-6);
  EXPECT_NEAR(gradients[1].item<double>(), 0.8, 1e-6);
}

TEST(ClipGlobalNorm, DoesWhatTorchDoes) {
  torch::manual_seed(3);
  for (const double max_norm : {0.01, 1.0, 30.0, 1e6}) {
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> parameters;
    for (const std::int64_t size : {5, 700, 33}) {
      parameters.push_back(torch::zeros({size}, torch::requires_grad()));
      parameters.back().mutable_grad() = torch::randn({size});
      gradients.push_back(parameters.back().grad().clone());
    }
    const double expected = torch::nn::utils::clip_grad_norm_(parameters, max_norm);
    EXPECT_NEAR(clip_global_norm(gradients, max_norm) / expected, 1, 1e-6);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      EXPECT_TRUE(torch::allclose(gradients[i], parameters[i].grad(), 1e-6, 0));
  }
}

TEST(ClipGlobalNorm, LeavesSmallUnclippedAndNonFiniteGradientsAlone) {
  const at::Tensor gradient = torch::tensor({0.3, 0.4});
  const at::Tensor before = gradient.clone();
  EXPECT_NEAR(clip_global_norm({gradient}, 1.0), 0.5, 1e-6);
  EXPECT_TRUE(gradient.equal(before));
  EXPECT_NEAR(clip_global_norm({gradient}, 0.0), 0.5, 1e-6);
  EXPECT_TRUE(gradient.equal(before));
  const at::Tensor broken = torch::tensor({1.0, kInfinity});
  EXPECT_FALSE(std::isfinite(clip_global_norm({gradient, broken}, 0.1)));
  EXPECT_TRUE(gradient.equal(before));
  EXPECT_THROW(clip_global_norm({gradient}, kNan), ConfigError);
}

TEST(FirstNonFinite, NamesTheFirst) {
  const at::Tensor good = torch::ones({100});
  at::Tensor nan = torch::ones({100});
  nan[57] = kNan;
  const at::Tensor infinite = torch::full({2}, -kInfinity, torch::kBFloat16);
  EXPECT_EQ(first_non_finite({{"a", good}, {"b", at::Tensor()}}), std::nullopt);
  EXPECT_EQ(first_non_finite({{"a", good}, {"b", nan}, {"c", infinite}}), "b");
  EXPECT_EQ(first_non_finite({{"a", good}, {"c", infinite}, {"b", nan}}), "c");
  EXPECT_EQ(first_non_finite({{"a", torch::full({1}, 1e308, torch::kDouble)}}), std::nullopt);
}

}  // namespace
}  // namespace headroom
