#include "optim/adam.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include <headroom/core/error.h>
#include "optim/reference.h"
#include "optim/sgd.h"

namespace headroom {
namespace {

using testing::expect_independent_of_threads;
using testing::many_shapes;
using testing::ReferencePair;
using testing::Shapes;
using torch::optim::OptimizerParamGroup;

constexpr double kTolerance = 1e-6;

template <typename Ours, typename Theirs>
void expect_equal_over_100_steps(ReferencePair& pair, Ours& ours, Theirs& theirs) {
  for (int step = 0; step < 100; ++step) {
    pair.give_gradients(step);
    ours.step();
    theirs.step();
    ASSERT_LE(pair.largest_difference(), kTolerance) << "after step " << step;
  }
}

TEST(AdamW, EqualsLibTorchOver100Steps) {
  for (const double weight_decay : {0.0, 0.01, 0.3}) {
    ReferencePair pair(many_shapes());
    AdamW ours(pair.ours, AdamWOptions(2e-3).betas({0.8, 0.95}).weight_decay(weight_decay));
    torch::optim::AdamW theirs(
        pair.theirs,
        torch::optim::AdamWOptions(2e-3).betas({0.8, 0.95}).weight_decay(weight_decay));
    expect_equal_over_100_steps(pair, ours, theirs);
  }
}

TEST(Adam, EqualsLibTorchOver100Steps) {
  for (const double weight_decay : {0.0, 0.1}) {
    ReferencePair pair(many_shapes());
    Adam ours(pair.ours, AdamOptions(1e-3).weight_decay(weight_decay).eps(1e-6));
    torch::optim::Adam theirs(pair.theirs,
                              torch::optim::AdamOptions(1e-3).weight_decay(weight_decay).eps(1e-6));
    expect_equal_over_100_steps(pair, ours, theirs);
  }
}

TEST(SGD, EqualsLibTorchOver100Steps) {
  struct Case {
    double momentum, dampening, weight_decay;
    bool nesterov;
  };
  for (const Case& c : {Case{0, 0, 0, false}, Case{0, 0, 0.1, false}, Case{0.9, 0, 0, false},
                        Case{0.9, 0.5, 0.01, false}, Case{0.9, 0, 0.01, true}}) {
    ReferencePair pair(many_shapes());
    SGD ours(pair.ours, SGDOptions(0.01)
                            .momentum(c.momentum)
                            .dampening(c.dampening)
                            .weight_decay(c.weight_decay)
                            .nesterov(c.nesterov));
    torch::optim::SGD theirs(pair.theirs, torch::optim::SGDOptions(0.01)
                                              .momentum(c.momentum)
                                              .dampening(c.dampening)
                                              .weight_decay(c.weight_decay)
                                              .nesterov(c.nesterov));
    expect_equal_over_100_steps(pair, ours, theirs);
  }
}

TEST(AdamW, GroupsHaveTheirOwnOptionsAndFollowAScheduler) {
  ReferencePair pair(Shapes{{40, 30}, {30}, {5, 5}});
  const auto groups = [](const std::vector<at::Tensor>& p, auto options) {
    std::vector<OptimizerParamGroup> made;
    made.emplace_back(
        std::vector<at::Tensor>{p[0]},
        std::make_unique<decltype(options)>(decltype(options)(3e-3).weight_decay(0.2)));
    made.emplace_back(std::vector<at::Tensor>{p[1], p[2]});
    return made;
  };
  AdamW ours(groups(pair.ours, AdamWOptions()), AdamWOptions(1e-3).weight_decay(0));
  torch::optim::AdamW theirs(groups(pair.theirs, torch::optim::AdamWOptions()),
                             torch::optim::AdamWOptions(1e-3).weight_decay(0));
  torch::optim::StepLR our_schedule(ours, 10, 0.5);
  torch::optim::StepLR their_schedule(theirs, 10, 0.5);
  for (int step = 0; step < 100; ++step) {
    pair.give_gradients(step);
    ours.step();
    theirs.step();
    our_schedule.step();
    their_schedule.step();
    ASSERT_LE(pair.largest_difference(), kTolerance);
  }
  EXPECT_DOUBLE_EQ(ours.param_groups()[0].options().get_lr(),
                   theirs.param_groups()[0].options().get_lr());
}

TEST(AdamW, SkipsParametersWithoutGradientAndRunsTheClosure) {
  ReferencePair pair(Shapes{{9}, {9}});
  AdamW optimizer(pair.ours, AdamWOptions(0.1));
  const auto closure = [&]() {
    optimizer.zero_grad();
    const at::Tensor loss = (pair.ours[0] * pair.ours[0]).sum();
    loss.backward();
    return loss;
  };
  const at::Tensor loss = optimizer.step(closure);
  EXPECT_TRUE(loss.defined());
  EXPECT_TRUE(torch::equal(pair.ours[1], pair.theirs[1]));
  EXPECT_FALSE(torch::equal(pair.ours[0], pair.theirs[0]));
  EXPECT_EQ(optimizer.state().size(), 1U);
}

TEST(AdamW, OtherTypesAndLayoutsTakeThePlainPath) {
  ReferencePair pair(Shapes{{12, 20}});
  const auto leaf = [](const at::Tensor& values) {
    return values.detach().clone(at::MemoryFormat::Preserve).requires_grad_();
  };
  const at::Tensor doubles = leaf(pair.ours[0].to(torch::kDouble));
  const at::Tensor transposed = leaf(pair.ours[0].detach().t());
  ASSERT_FALSE(transposed.is_contiguous());
  AdamW of_doubles({doubles}, AdamWOptions(0.01));
  AdamW of_transposed({transposed}, AdamWOptions(0.01));
  AdamW plain({pair.ours[0]}, AdamWOptions(0.01));
  for (int step = 0; step < 10; ++step) {
    pair.give_gradients(step);
    doubles.mutable_grad() = pair.ours[0].grad().to(torch::kDouble);
    // A gradient in another order than the parameter in even steps.
    transposed.mutable_grad() =
        step % 2 == 0 ? pair.ours[0].grad().t().contiguous() : pair.ours[0].grad().t();
    of_doubles.step();
    of_transposed.step();
    plain.step();
  }
  EXPECT_LE((doubles - pair.ours[0]).abs().max().item<double>(), kTolerance);
  EXPECT_LE((transposed.t() - pair.ours[0]).abs().max().item<double>(), kTolerance);
}

TEST(AdamW, DoesNotDependOnTheNumberOfThreads) {
  expect_independent_of_threads<AdamW>({{700, 333}, {65537}}, AdamWOptions(0.01));
}

TEST(AdamW, BumpsTheVersionOfTheParameter) {
  ReferencePair pair(Shapes{{10}});
  AdamW optimizer(pair.ours);
  pair.give_gradients(0);
  const auto before = pair.ours[0]._version();
  optimizer.step();
  EXPECT_GT(pair.ours[0]._version(), before);
}

TEST(AdamW, RefusesWhatItCannotServe) {
  const std::vector<at::Tensor> parameters = {torch::zeros({3}, torch::requires_grad())};
  EXPECT_THROW(AdamW(parameters, AdamWOptions(1e-3).amsgrad(true)), ConfigError);
  EXPECT_THROW(Adam(parameters, AdamOptions(1e-3).amsgrad(true)), ConfigError);
  EXPECT_THROW(AdamW(parameters, AdamWOptions(-1)), ConfigError);
  EXPECT_THROW(AdamW(parameters, AdamWOptions(1e-3).betas({0.9, 1.0})), ConfigError);
  EXPECT_THROW(SGD(parameters, SGDOptions(0.1).nesterov(true)), ConfigError);
  std::vector<OptimizerParamGroup> foreign;
  foreign.emplace_back(parameters, std::make_unique<torch::optim::AdamWOptions>(1e-3));
  EXPECT_THROW(AdamW(foreign, AdamWOptions(1e-3)), ConfigError);
}

TEST(AdamW, AnErrorLeavesAllParametersAsTheyWere) {
  ReferencePair pair(Shapes{{8, 4}, {8, 4}});
  AdamW optimizer(pair.ours, AdamWOptions(0.1));
  pair.give_gradients(0);
  const at::Tensor indices = torch::zeros({1, 1}, torch::kLong);
  pair.ours[1].mutable_grad() = torch::sparse_coo_tensor(indices, torch::ones({1, 4}), {8, 4});
  EXPECT_THROW(optimizer.step(), ConfigError);
  EXPECT_TRUE(pair.identical());
}

}  // namespace
}  // namespace headroom
