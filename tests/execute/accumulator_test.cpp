#include <headroom/execute/accumulator.h>

#include <headroom/core/error.h>

#include <cmath>
#include <limits>

namespace headroom {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor scalar_parameter(double value) {
  return torch::full({}, value, torch::TensorOptions(torch::kDouble).requires_grad(true));
}

/// One weight w = 0 and plain SGD with learning rate 1: after an update, w is minus the gradient
/// that was applied.
struct OneWeight {
  at::Tensor w = scalar_parameter(0);
  torch::optim::SGD optimizer{std::vector<at::Tensor>{w}, torch::optim::SGDOptions(1.0)};

  /// A loss whose gradient is `gradient`.
  at::Tensor loss(double gradient) const { return w * gradient; }
  double value() const { return w.item<double>(); }
};

TEST(GradientAccumulator, UpdatesWhenTheWindowIsFull) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 3);
  for (int window = 0; window < 2; ++window) {
    EXPECT_FALSE(accumulator.backward(model.loss(1), 1));
    EXPECT_FALSE(accumulator.backward(model.loss(2), 1));
    EXPECT_EQ(accumulator.num_pending(), 2);
    EXPECT_TRUE(accumulator.backward(model.loss(6), 1));
    EXPECT_EQ(accumulator.num_pending(), 0);
    EXPECT_DOUBLE_EQ(model.value(), -3.0 * (window + 1));
  }
  EXPECT_EQ(accumulator.num_updates(), 2);
}

TEST(GradientAccumulator, WeighsByItems) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  accumulator.backward(model.loss(1), 10);
  accumulator.backward(model.loss(4), 30);
  EXPECT_DOUBLE_EQ(model.value(), -(10 * 1 + 30 * 4) / 40.0);
}

TEST(GradientAccumulator, TakesSummedLosses) {
  OneWeight model;
  AccumulatorOptions options;
  options.loss_reduction = LossReduction::kSum;
  GradientAccumulator accumulator(model.optimizer, 2, options);
  accumulator.backward(model.loss(10) + 20, 10);
  accumulator.backward(model.loss(120) + 60, 30);
  EXPECT_NEAR(model.value(), -130 / 40.0, 1e-15);
  EXPECT_DOUBLE_EQ(accumulator.last_window().loss, 80 / 40.0);
}

TEST(GradientAccumulator, AZeroItemMicroBatchContributesNothing) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 3);
  EXPECT_FALSE(accumulator.backward(model.loss(kNan), 0));  // what the mean over nothing is
  EXPECT_FALSE(accumulator.backward(model.loss(2), 5));
  EXPECT_TRUE(accumulator.backward(model.loss(kNan), 0));
  EXPECT_DOUBLE_EQ(model.value(), -2);
  EXPECT_DOUBLE_EQ(accumulator.last_window().grad_norm, 2);
  EXPECT_EQ(accumulator.last_window().items, 5);
  EXPECT_EQ(accumulator.num_skipped_updates(), 0);
}

TEST(GradientAccumulator, AWindowWithoutItemsDoesNotUpdate) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  EXPECT_FALSE(accumulator.backward(model.loss(kNan), 0));
  EXPECT_FALSE(accumulator.backward(model.loss(kNan), 0));
  EXPECT_EQ(accumulator.num_pending(), 0);
  EXPECT_EQ(accumulator.num_updates(), 0);
  EXPECT_TRUE(std::isnan(accumulator.last_window().loss));
  EXPECT_EQ(model.value(), 0);
  accumulator.backward(model.loss(3), 1);
  EXPECT_TRUE(accumulator.backward(model.loss(3), 1));
  EXPECT_DOUBLE_EQ(model.value(), -3);
}

TEST(GradientAccumulator, FlushWithoutAWindowDoesNothing) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  EXPECT_FALSE(accumulator.flush());
  accumulator.backward(model.loss(1), 1);
  EXPECT_TRUE(accumulator.flush());
  EXPECT_FALSE(accumulator.flush());
  EXPECT_EQ(accumulator.num_updates(), 1);
}

TEST(GradientAccumulator, FollowsAScheduleByEpoch) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, {{0, 3}, {2, 1}, {4, 2}});
  EXPECT_EQ(accumulator.steps(), 3);
  const std::vector<std::int64_t> expected = {3, 3, 1, 1, 2, 2};
  for (std::size_t epoch = 0; epoch < expected.size(); ++epoch) {
    accumulator.start_epoch(static_cast<std::int64_t>(epoch));
    EXPECT_EQ(accumulator.steps(), expected[epoch]);
    for (std::int64_t i = 1; i <= expected[epoch]; ++i)
      EXPECT_EQ(accumulator.backward(model.loss(1), 1), i == expected[epoch]);
  }
  EXPECT_THROW(accumulator.start_epoch(-1), ConfigError);
}

TEST(GradientAccumulator, AnEpochCannotStartInsideAWindow) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, {{0, 4}, {1, 1}});
  accumulator.backward(model.loss(1), 1);
  EXPECT_THROW(accumulator.start_epoch(1), Error);
  EXPECT_EQ(accumulator.steps(), 4);
  EXPECT_TRUE(accumulator.flush());
  accumulator.start_epoch(1);
  EXPECT_EQ(accumulator.steps(), 1);
}

TEST(GradientAccumulator, FreesGradientsAfterTheUpdate) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  accumulator.backward(model.loss(1), 1);
  EXPECT_TRUE(model.w.grad().defined());
  accumulator.backward(model.loss(1), 1);
  EXPECT_FALSE(model.w.grad().defined());
}

TEST(GradientAccumulator, DropsGradientsThatWereThereBefore) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 1);
  model.loss(1000).backward();
  accumulator.backward(model.loss(1), 1);
  EXPECT_DOUBLE_EQ(model.value(), -1);
}

TEST(GradientAccumulator, SkipsANonFiniteUpdateAndStartsAnew) {
  auto linear = torch::nn::Linear(2, 1);
  torch::nn::init::zeros_(linear->weight);
  torch::nn::init::zeros_(linear->bias);
  torch::optim::SGD optimizer(linear->parameters(), torch::optim::SGDOptions(1.0));
  GradientAccumulator accumulator(optimizer, 2, *linear);
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(accumulator.backward((linear->bias * kInfinity).sum() + linear->weight.sum(), 1));
  EXPECT_FALSE(accumulator.backward(linear->bias.sum() + linear->weight.sum(), 1));
  const std::string message = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("'bias'"), std::string::npos) << message;
  EXPECT_EQ(accumulator.num_skipped_updates(), 1);
  EXPECT_EQ(accumulator.num_updates(), 0);
  EXPECT_FALSE(accumulator.last_window().updated);
  EXPECT_EQ(linear->bias.item<float>(), 0);
  EXPECT_FALSE(linear->bias.grad().defined());

  EXPECT_FALSE(accumulator.backward(linear->bias.sum(), 1));
  EXPECT_TRUE(accumulator.backward(linear->bias.sum(), 1));
  EXPECT_EQ(linear->bias.item<float>(), -1);
  EXPECT_EQ(accumulator.num_updates(), 1);
}

TEST(GradientAccumulator, MakesANonFiniteUpdateAnErrorOnRequest) {
  OneWeight model;
  AccumulatorOptions options;
  options.non_finite = NonFinitePolicy::kError;
  GradientAccumulator accumulator(model.optimizer, 1, options);
  EXPECT_THROW(accumulator.backward(model.loss(kNan), 1), Error);
  EXPECT_THROW(accumulator.backward(model.loss(1), 1), Error);
  accumulator.discard();
  EXPECT_TRUE(accumulator.backward(model.loss(1), 1));
  EXPECT_DOUBLE_EQ(model.value(), -1);
}

struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("out of everything");
  }
};

TEST(GradientAccumulator, AFailedBackwardCanBeDiscarded) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  accumulator.backward(model.loss(5), 1);
  EXPECT_ANY_THROW(accumulator.backward(Failing::apply(model.loss(7)), 1));
  EXPECT_THROW(accumulator.backward(model.loss(1), 1), Error);
  EXPECT_THROW(accumulator.flush(), Error);
  accumulator.discard();
  EXPECT_FALSE(model.w.grad().defined());
  EXPECT_EQ(accumulator.num_pending(), 0);
  EXPECT_FALSE(accumulator.backward(model.loss(1), 1));
  EXPECT_TRUE(accumulator.backward(model.loss(3), 1));
  EXPECT_DOUBLE_EQ(model.value(), -2);
  EXPECT_DOUBLE_EQ(accumulator.last_window().loss, 0);
}

TEST(GradientAccumulator, WrongArgumentsLeaveTheWindowAsItWas) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 2);
  accumulator.backward(model.loss(1), 1);
  EXPECT_THROW(accumulator.backward(model.loss(1), -1), ConfigError);
  EXPECT_THROW(accumulator.backward(model.loss(1).expand({2}), 1), ConfigError);
  EXPECT_THROW(accumulator.backward(at::Tensor(), 1), ConfigError);
  EXPECT_EQ(accumulator.num_pending(), 1);
  EXPECT_TRUE(accumulator.backward(model.loss(3), 1));
  EXPECT_DOUBLE_EQ(model.value(), -2);
}

TEST(GradientAccumulator, TakesALossOfOneElement) {
  OneWeight model;
  GradientAccumulator accumulator(model.optimizer, 1);
  EXPECT_TRUE(accumulator.backward(model.loss(2).reshape({1, 1}), 4));
  EXPECT_DOUBLE_EQ(model.value(), -2);
}

TEST(GradientAccumulator, TakesAParameterThatIsInTwoGroupsOnce) {
  OneWeight model;
  const at::Tensor other = scalar_parameter(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{model.w, other, other});
  torch::optim::SGD optimizer(std::move(groups), torch::optim::SGDOptions(1.0));
  GradientAccumulator accumulator(optimizer, 2);
  accumulator.backward(other * 4, 1);
  accumulator.backward(other * 4, 1);
  EXPECT_DOUBLE_EQ(accumulator.last_window().grad_norm, 4);
}

TEST(GradientAccumulator, ParametersUsedInSomeMicroBatchesOnlyAreAveragedOverAll) {
  OneWeight model;
  const at::Tensor rare = scalar_parameter(0);
  const at::Tensor unused = scalar_parameter(0);
  model.optimizer.add_param_group(torch::optim::OptimizerParamGroup({rare, unused}));
  GradientAccumulator accumulator(model.optimizer, 2);
  accumulator.backward(model.loss(1), 1);
  accumulator.backward(model.loss(1) + rare * 6, 2);
  EXPECT_DOUBLE_EQ(rare.item<double>(), -4);
  EXPECT_FALSE(unused.grad().defined());
}

TEST(GradientAccumulator, TakesSparseGradients) {
  torch::manual_seed(0);
  auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  const at::Tensor before = embedding->weight.detach().clone();
  torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(1.0));
  GradientAccumulator accumulator(optimizer, 2);
  accumulator.backward(embedding(torch::tensor({1, 2})).sum() / 2, 2);
  accumulator.backward(embedding(torch::tensor({2})).sum(), 1);
  at::Tensor expected = torch::zeros({10, 3});
  expected[1] = 1 / 3.0;
  expected[2] = 2 / 3.0;
  EXPECT_TRUE(torch::allclose(before - embedding->weight, expected, 1e-6, 1e-7));
  EXPECT_NEAR(accumulator.last_window().grad_norm, std::sqrt(3 * (1 + 4)) / 3, 1e-6);
}

TEST(GradientAccumulator, AnOptimizerOfAnotherModelIsAnError) {
  OneWeight model;
  OneWeight other;
  GradientAccumulator accumulator(model.optimizer, 2);
  EXPECT_THROW(accumulator.backward(other.loss(1), 1), Error);
}

TEST(GradientAccumulator, ReduceSeesSumsOverItemsAndEveryParameter) {
  OneWeight model;
  const at::Tensor unused = scalar_parameter(0);
  model.optimizer.add_param_group(torch::optim::OptimizerParamGroup({unused}));
  AccumulatorOptions options;
  options.max_grad_norm = 1e9;
  options.reduce = [](const std::vector<at::Tensor>& gradients, WindowTotals& totals) {
    ASSERT_EQ(gradients.size(), 2U);
    EXPECT_NEAR(gradients[0].item<double>(), 3 * 2 + 5 * 4, 1e-12);
    EXPECT_EQ(gradients[1].item<double>(), 0);
    EXPECT_EQ(totals.items, 8);
    gradients[0].add_(12);  // another rank, with two items
    totals.items += 2;
    totals.loss_sum += 50;
  };
  GradientAccumulator accumulator(model.optimizer, 2, options);
  accumulator.backward(model.loss(2) + 1, 3);
  EXPECT_TRUE(accumulator.backward(model.loss(4) + 1, 5));
  EXPECT_NEAR(model.value(), -38 / 10.0, 1e-12);
  EXPECT_EQ(accumulator.last_window().items, 10);
  EXPECT_NEAR(accumulator.last_window().loss, 58 / 10.0, 1e-12);
}

TEST(GradientAccumulator, ARankWithoutItemsStillReduces) {
  OneWeight model;
  AccumulatorOptions options;
  options.reduce = [](const std::vector<at::Tensor>& gradients, WindowTotals& totals) {
    gradients[0].add_(6);
    totals.items += 2;
  };
  GradientAccumulator accumulator(model.optimizer, 1, options);
  EXPECT_TRUE(accumulator.backward(model.loss(kNan), 0));
  EXPECT_DOUBLE_EQ(model.value(), -3);
}

TEST(GradientAccumulator, WeighsExactlyWhenTheLossIsInHalfPrecision) {
  // 129/128 rounds to 1 in bf16, so that a seed in the loss's precision would lose the weight.
  const at::Tensor w = torch::zeros({}, torch::requires_grad());
  torch::optim::SGD optimizer({w}, torch::optim::SGDOptions(1.0));
  GradientAccumulator accumulator(optimizer, 3);
  accumulator.backward((w * 1).to(torch::kBFloat16), 128);
  accumulator.backward((w * 3).to(torch::kBFloat16), 129);
  accumulator.backward(w * 5, 1);  // and losses of both kinds in one window
  EXPECT_NEAR(w.item<double>(), -(128 * 1 + 129 * 3 + 5) / 258.0, 1e-6);
}

}  // namespace
}  // namespace headroom
