#include <headroom/ops/transformer.h>

#include <headroom/core/error.h>

#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using Reduction = CrossEntropyOptions::Reduction;
using torch::Tensor;
struct Case {
  std::int64_t rows, width, classes;
};

TEST(LinearCrossEntropy, EqualsItsTwin) {
  for (const Case& c :
       std::vector<Case>{{1, 1, 1}, {1, 3, 2}, {7, 5, 33}, {530, 16, 50}, {40, 8, 16500}}) {
    for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << c.rows << " rows, " << c.classes << " classes, weighted " << weighted);
        torch::manual_seed(c.rows);
        CrossEntropyOptions options;
        options.reduction = reduction;
        if (weighted) options.item_weights = torch::rand({c.rows}) + 0.1;
        Tensor targets = torch::randint(0, c.classes, {c.rows});
        if (c.rows > 2) targets.slice(0, 0, c.rows, 3).fill_(options.ignore_index);
        reference::expect_equal(
            [&](const std::vector<Tensor>& in) {
              return linear_cross_entropy(in[0], in[1], targets, options);
            },
            [&](const std::vector<Tensor>& in) {
              return reference::linear_cross_entropy(in[0], in[1], targets, options);
            },
            {torch::randn({c.rows, c.width}), torch::randn({c.classes, c.width})}, 1e-5);
      }
    }
  }
}

TEST(LinearCrossEntropy, TakesDoubleAndMoreDimensions) {
  torch::manual_seed(1);
  const Tensor targets = torch::randint(0, 11, {2, 3});
  for (const auto type : {torch::kDouble, torch::kFloat}) {
    reference::expect_equal(
        [&](const std::vector<Tensor>& in) { return linear_cross_entropy(in[0], in[1], targets); },
        [&](const std::vector<Tensor>& in) {
          return reference::linear_cross_entropy(in[0], in[1], targets, {});
        },
        {torch::randn({2, 3, 4}), torch::randn({11, 4})}, type == torch::kDouble ? 1e-10 : 1e-5,
        type);
  }
}

TEST(LinearCrossEntropy, IsFiniteForHugeLogits) {
  torch::manual_seed(2);
  const Tensor hidden = torch::randn({9, 8}) * 1e3, weight = torch::randn({40, 8}) * 1e2,
               targets = torch::randint(0, 40, {9});
  reference::expect_equal(
      [&](const std::vector<Tensor>& in) { return linear_cross_entropy(in[0], in[1], targets); },
      [&](const std::vector<Tensor>& in) {
        return reference::linear_cross_entropy(in[0], in[1], targets, {});
      },
      {hidden, weight}, 1e-5);
}

TEST(LinearCrossEntropy, WithEverythingIgnoredIsAsInPyTorch) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
      CrossEntropyOptions options;
      options.reduction = reduction;
      options.ignore_index = -1;
      const auto results = reference::run(
          [&](const std::vector<Tensor>& in) {
            return linear_cross_entropy(in[0], in[1], torch::full({4}, -1, torch::kLong), options);
          },
          {torch::randn({4, 3}), torch::randn({6, 3})}, type);
      if (reduction == Reduction::kMean) {
        EXPECT_TRUE(std::isnan(results[0].item<double>()));
      } else {
        EXPECT_EQ(results[0].item<double>(), 0.0);
      }
      EXPECT_EQ(results[1].abs().max().item<double>(), 0.0);
      EXPECT_EQ(results[2].abs().max().item<double>(), 0.0);
    }
  }
}

TEST(LinearCrossEntropy, ScalesItsGradientsByWhatComesIn) {
  torch::manual_seed(3);
  const Tensor targets = torch::randint(0, 20, {6});
  reference::expect_equal(
      [&](const std::vector<Tensor>& in) {
        return linear_cross_entropy(in[0], in[1], targets) * -2.5;
      },
      [&](const std::vector<Tensor>& in) {
        return reference::linear_cross_entropy(in[0], in[1], targets, {}) * -2.5;
      },
      {torch::randn({6, 5}), torch::randn({20, 5})}, 1e-5);
}

TEST(LinearCrossEntropy, GivesOnlyTheGradientsThatAreWanted) {
  const Tensor hidden = torch::randn({6, 5}), weight = torch::randn({20, 5}).requires_grad_(true);
  linear_cross_entropy(hidden, weight, torch::zeros({6}, torch::kLong)).backward();
  EXPECT_TRUE(weight.grad().defined());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(
      linear_cross_entropy(hidden, weight, torch::zeros({6}, torch::kLong)).requires_grad());
}

TEST(LinearCrossEntropy, RunsBackwardOnceOnly) {
  Tensor hidden = torch::randn({6, 5}).requires_grad_(true);
  const Tensor loss =
      linear_cross_entropy(hidden, torch::randn({20, 5}), torch::zeros({6}, torch::kLong));
  loss.backward({}, true);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(LinearCrossEntropy, DoesNotDependOnThreads) {
  torch::manual_seed(4);
  const Tensor hidden = torch::randn({600, 32}), weight = torch::randn({100, 32}),
               targets = torch::randint(0, 100, {600});
  const auto function = [&](const std::vector<Tensor>& in) {
    return linear_cross_entropy(in[0], in[1], targets);
  };
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = reference::run(function, {hidden, weight}, torch::kFloat);
  at::set_num_threads(3);
  const auto three = reference::run(function, {hidden, weight}, torch::kFloat);
  at::set_num_threads(before);
  EXPECT_EQ(one[0].item<float>(), three[0].item<float>());
  EXPECT_LE(reference::difference(one[2], three[2]),
            1e-6);  // OpenBLAS may order its sums by threads
}

TEST(LinearCrossEntropy, RefusesATargetOutsideOfTheClasses) {
  EXPECT_THROW(
      linear_cross_entropy(torch::randn({2, 3}), torch::randn({4, 3}), torch::tensor({1, 4})),
      DataError);
  EXPECT_THROW(
      linear_cross_entropy(torch::randn({2, 3}), torch::randn({4, 3}), torch::tensor({-1, 0})),
      DataError);
  EXPECT_THROW(
      linear_cross_entropy(torch::randn({2, 3}), torch::randn({4, 5}), torch::tensor({1, 0})),
      ConfigError);
}

}  // namespace
}  // namespace headroom
