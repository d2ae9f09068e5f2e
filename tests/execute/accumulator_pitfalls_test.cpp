// One test per way in which gradient accumulation is known to go wrong in one process.

#include <headroom/core/error.h>
#include <headroom/execute/accumulator.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/schedule.h>
#include "core/log.h"

#include <torch/csrc/autograd/function_hook.h>

#include <cmath>

#include "execute/padding.h"
#include "support/transformer.h"

namespace headroom {
namespace {

using testing::kPadding;
using testing::SmallGpt;

/// A token classifier in double, a batch with sequences of very different lengths, and what one
/// large batch gives.
class AccumulationPitfall : public ::testing::Test {
 protected:
  AccumulationPitfall() {
    torch::manual_seed(7);
    model_->to(torch::kDouble);
    tokens_ = torch::randint(11, {8, 12});
    targets_ = torch::randint(11, {8, 12});
    const std::vector<std::int64_t> lengths = {12, 1, 3, 12, 2, 0, 5, 1};
    for (std::int64_t i = 0; i < 8; ++i) targets_[i].slice(0, lengths[i]).fill_(kPadding);
  }

  at::Tensor loss(std::int64_t first, std::int64_t last) {
    const at::Tensor logits = model_->forward(tokens_.slice(0, first, last));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                                targets_.slice(0, first, last).flatten());
  }
  std::int64_t items(std::int64_t first, std::int64_t last) const {
    return targets_.slice(0, first, last).ne(kPadding).sum().item<std::int64_t>();
  }

  /// Gradients of the samples as one batch, by LibTorch alone.
  std::vector<at::Tensor> large_batch_gradients(std::int64_t first, std::int64_t last) {
    return torch::autograd::grad({loss(first, last)}, model_->parameters());
  }
  static double norm(const std::vector<at::Tensor>& gradients) {
    double sum = 0;
    for (const at::Tensor& gradient : gradients) sum += gradient.square().sum().item<double>();
    return std::sqrt(sum);
  }
  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : model_->parameters())
      copies.push_back(parameter.detach().clone());
    return copies;
  }
  /// With plain SGD of rate 1 an update subtracts the gradient.
  void expect_applied(const std::vector<at::Tensor>& before,
                      const std::vector<at::Tensor>& gradients, double factor = 1) {
    const std::vector<at::Tensor> after = weights();
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_LT((before[i] - gradients[i] * factor - after[i]).abs().max().item<double>(), 1e-13)
          << "parameter " << i;
    }
  }

  torch::nn::Sequential model_{torch::nn::Embedding(11, 6), torch::nn::Linear(6, 9),
                               torch::nn::Tanh(), torch::nn::Linear(9, 11)};
  at::Tensor tokens_, targets_;  // (8, 12)
  torch::optim::SGD optimizer_{model_->parameters(), torch::optim::SGDOptions(1.0)};
};

TEST_F(AccumulationPitfall, MeanOfMeans) {
  const auto gradients = large_batch_gradients(0, 8);
  const auto before = weights();
  GradientAccumulator accumulator(optimizer_, 4);
  for (std::int64_t i = 0; i < 8; i += 2) accumulator.backward(loss(i, i + 2), items(i, i + 2));
  expect_applied(before, gradients);
}

/// Bytes at the peak of one window of `steps` micro-batches. `num_windows` are run before, so that
/// the optimizer's state is there.
std::int64_t peak_of_window(std::int64_t steps) {
  torch::manual_seed(1);
  SmallGpt model(50, 32, 2, 0.0);
  torch::optim::AdamW optimizer(model->parameters());
  GradientAccumulator accumulator(optimizer, steps);
  const at::Tensor tokens = torch::randint(50, {2, 16});
  for (int window = 0; window < 2; ++window) {
    if (window == 1) MemoryMeter::instance().reset_peak();
    for (std::int64_t i = 0; i < steps; ++i)
      accumulator.backward(model->loss(tokens, tokens), tokens.numel());
  }
  EXPECT_EQ(accumulator.num_updates(), 2);
  return MemoryMeter::instance().peak_bytes() - MemoryMeter::instance().live_bytes();
}

TEST_F(AccumulationPitfall, ActivationsOfAllMicroBatchesStayAlive) {
  MemoryMeter::instance();
  peak_of_window(2);  // warms up what LibTorch allocates once
  const std::int64_t two = peak_of_window(2);
  EXPECT_GT(two, 0);
  EXPECT_EQ(peak_of_window(64), two);
}

TEST_F(AccumulationPitfall, LoggedLossAndNormOffByAFactorOfN) {
  const double expected_loss = loss(0, 8).item<double>();
  const double expected_norm = norm(large_batch_gradients(0, 8));
  GradientAccumulator accumulator(optimizer_, 4);
  for (std::int64_t i = 0; i < 8; i += 2) accumulator.backward(loss(i, i + 2), items(i, i + 2));
  EXPECT_NEAR(accumulator.last_window().loss, expected_loss, 1e-13);
  EXPECT_NEAR(accumulator.last_window().grad_norm, expected_norm, 1e-13);
  EXPECT_EQ(accumulator.last_window().items, items(0, 8));
  EXPECT_EQ(accumulator.last_window().num_micro_batches, 4);
}

TEST_F(AccumulationPitfall, LastPartialWindowDroppedOrDividedByFullN) {
  GradientAccumulator accumulator(optimizer_, 3);
  for (std::int64_t i = 0; i < 6; i += 2) accumulator.backward(loss(i, i + 2), items(i, i + 2));
  const auto gradients = large_batch_gradients(6, 8);
  const auto before = weights();
  EXPECT_FALSE(accumulator.backward(loss(6, 8), items(6, 8)));
  EXPECT_TRUE(accumulator.flush());
  expect_applied(before, gradients);
  EXPECT_EQ(accumulator.last_window().num_micro_batches, 1);
}

TEST_F(AccumulationPitfall, LastPartialWindowLeaksIntoTheNextEpoch) {
  GradientAccumulator accumulator(optimizer_, 3);
  accumulator.backward(loss(6, 8), items(6, 8));
  accumulator.flush();
  accumulator.start_epoch(1);
  const auto gradients = large_batch_gradients(0, 6);
  const auto before = weights();
  for (std::int64_t i = 0; i < 6; i += 2)
    EXPECT_EQ(accumulator.backward(loss(i, i + 2), items(i, i + 2)), i == 4);
  expect_applied(before, gradients);
}

TEST_F(AccumulationPitfall, SchedulerSteppedPerMicroBatch) {
  GradientAccumulator accumulator(optimizer_, 3);
  LrScheduler scheduler(optimizer_, LearningRateSchedule(ScheduleKind::kLinear, 10));
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (std::int64_t i = 0; i < 8; i += 2) {
      if (accumulator.backward(loss(i, i + 2), items(i, i + 2))) scheduler.step();
    }
    if (accumulator.flush()) scheduler.step();
  }
  EXPECT_EQ(scheduler.update(), 4);  // a full and a partial window per epoch
  EXPECT_EQ(accumulator.num_updates(), 4);
  EXPECT_DOUBLE_EQ(optimizer_.param_groups()[0].options().get_lr(), 0.6);
}

TEST_F(AccumulationPitfall, SchedulerSteppedForASkippedUpdate) {
  GradientAccumulator accumulator(optimizer_, 1);
  LrScheduler scheduler(optimizer_, LearningRateSchedule(ScheduleKind::kLinear, 10));
  if (accumulator.backward(loss(0, 2) * std::nan(""), items(0, 2))) scheduler.step();
  EXPECT_EQ(scheduler.update(), 0);
  EXPECT_EQ(accumulator.num_skipped_updates(), 1);
}

TEST_F(AccumulationPitfall, ClippingBeforeAveraging) {
  const auto gradients = large_batch_gradients(0, 8);
  const double full_norm = norm(gradients);
  const double max_norm = 0.4 * full_norm;
  const auto before = weights();
  AccumulatorOptions options;
  options.max_grad_norm = max_norm;
  GradientAccumulator accumulator(optimizer_, 4, options);
  for (std::int64_t i = 0; i < 8; i += 2) accumulator.backward(loss(i, i + 2), items(i, i + 2));
  expect_applied(before, gradients, max_norm / (full_norm + 1e-6));
  EXPECT_NEAR(accumulator.last_window().grad_norm, full_norm, 1e-13);
}

TEST_F(AccumulationPitfall, ScaledLossUnscaledPerMicroBatchOrAfterClipping) {
  constexpr double kScale = 1024;
  const auto gradients = large_batch_gradients(0, 8);
  const double expected_loss = loss(0, 8).item<double>();
  const double full_norm = norm(gradients);
  const auto before = weights();
  int num_unscales = 0;
  AccumulatorOptions options;
  options.max_grad_norm = 0.5 * full_norm;
  options.reduce = [&](const std::vector<at::Tensor>& sums, WindowTotals& totals) {
    for (const at::Tensor& sum : sums) sum.div_(kScale);
    totals.loss_sum /= kScale;
    ++num_unscales;
  };
  GradientAccumulator accumulator(optimizer_, 4, options);
  for (std::int64_t i = 0; i < 8; i += 2)
    accumulator.backward(loss(i, i + 2) * kScale, items(i, i + 2));
  EXPECT_EQ(num_unscales, 1);
  EXPECT_NEAR(accumulator.last_window().grad_norm, full_norm, 1e-13);
  EXPECT_NEAR(accumulator.last_window().loss, expected_loss, 1e-13);
  expect_applied(before, gradients, 0.5 * full_norm / (full_norm + 1e-6));
}

TEST_F(AccumulationPitfall, GradScalerUnscaledOrUpdatedPerMicroBatch) {
  GradScalerOptions scaler_options;
  scaler_options.init_scale = 1024;
  scaler_options.growth_interval = 2;
  GradScaler scaler(scaler_options);
  AccumulatorOptions options;
  options.reduce = [&](const std::vector<at::Tensor>& sums, WindowTotals& totals) {
    totals.loss_sum /= scaler.scale_factor();
    scaler.unscale(sums);  // throws when it is called twice in an update
  };
  GradientAccumulator accumulator(optimizer_, 4, options);
  const auto window = [&](double factor) {
    bool updated = false;
    for (std::int64_t i = 0; i < 8; i += 2)
      updated = accumulator.backward(scaler.scale(loss(i, i + 2)) * (i == 4 ? factor : 1),
                                     items(i, i + 2));
    scaler.update();
    return updated;
  };
  const auto gradients = large_batch_gradients(0, 8);
  const auto before = weights();
  EXPECT_TRUE(window(1));
  expect_applied(before, gradients);
  EXPECT_EQ(scaler.scale_factor(), 1024) << "grew after four micro-batches, not after two updates";
  EXPECT_TRUE(window(1));
  EXPECT_EQ(scaler.scale_factor(), 2048);
  const auto kept = weights();
  EXPECT_FALSE(window(HUGE_VAL)) << "an overflow in one micro-batch skips the update";
  EXPECT_EQ(scaler.scale_factor(), 1024) << "and backs off once";
  expect_applied(kept, gradients, 0);
}

TEST_F(AccumulationPitfall, EveryMicroBatchAllReduces) {
  int num_reductions = 0;
  AccumulatorOptions options;
  options.reduce = [&](const std::vector<at::Tensor>&, WindowTotals&) { ++num_reductions; };
  GradientAccumulator accumulator(optimizer_, 4, options);
  for (std::int64_t i = 0; i < 6; ++i) accumulator.backward(loss(i, i + 1), items(i, i + 1));
  EXPECT_EQ(num_reductions, 1);
  accumulator.flush();
  EXPECT_EQ(num_reductions, 2);
}

TEST_F(AccumulationPitfall, HalfPrecisionAccumulationDrifts) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    for (const auto loss_type : {type, torch::kFloat}) {
      // 4096 times 1: in bf16 a running sum stops at 256, in fp16 at 2048.
      const at::Tensor w = torch::zeros({4}, torch::TensorOptions(type).requires_grad(true));
      torch::optim::SGD optimizer({w}, torch::optim::SGDOptions(1.0));
      GradientAccumulator accumulator(optimizer, 4096);
      for (int i = 0; i < 4095; ++i) ASSERT_FALSE(accumulator.backward(w.to(loss_type).sum(), 1));
      EXPECT_FALSE(w.grad().defined());  // kept in fp32, beside
      EXPECT_TRUE(accumulator.backward(w.to(loss_type).sum(), 1));
      EXPECT_TRUE(w.eq(-1).all().item<bool>()) << type << ": " << w[0].item<float>();
      EXPECT_DOUBLE_EQ(accumulator.last_window().grad_norm, 2);
    }
  }
}

TEST_F(AccumulationPitfall, BatchNormIsNotTheLargeBatchAndNobodySaysSo) {
  torch::nn::Sequential body(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  const auto model = std::make_shared<torch::nn::Module>("net");
  model->register_module("body", body);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
  ::testing::internal::CaptureStderr();
  GradientAccumulator alone(optimizer, 1, *model);  // no accumulation: nothing to say
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  GradientAccumulator accumulator(optimizer, 2, *model);
  GradientAccumulator again(optimizer, 2, *model);
  const std::string message = ::testing::internal::GetCapturedStderr();
  const std::size_t found = message.find("'body.1'");
  EXPECT_NE(found, std::string::npos) << message;
  EXPECT_EQ(message.find("'body.1'", found + 1), std::string::npos) << "warned twice: " << message;

  EXPECT_EQ(warn_about_batch_norm(*model, "stage3"), "stage3.body.1");
  model->eval();
  EXPECT_EQ(warn_about_batch_norm(*model), std::nullopt);
  EXPECT_EQ(warn_about_batch_norm(*torch::nn::GroupNorm(1, 2)), std::nullopt);
}

TEST_F(AccumulationPitfall, WrapperCopiesGradients) {
  MemoryMeter& meter = MemoryMeter::instance();
  auto big = torch::nn::Linear(512, 512);
  const at::Tensor x = torch::randn({2, 512});
  torch::optim::SGD optimizer(big->parameters(), torch::optim::SGDOptions(0.1));
  GradientAccumulator accumulator(optimizer, 3);
  const std::int64_t before = meter.live_bytes();
  accumulator.backward(big(x).pow(2).mean(), 2);
  const void* memory = big->weight.grad().data_ptr();
  accumulator.backward(big(x).pow(2).mean(), 2);
  EXPECT_EQ(big->weight.grad().data_ptr(), memory);
  const std::int64_t gradient_bytes = (512 * 512 + 512) * 4;
  EXPECT_LE(meter.live_bytes() - before, gradient_bytes + 64);  // and the sum of losses
  meter.reset_peak();
  accumulator.flush();
  EXPECT_LT(meter.peak_bytes() - before, gradient_bytes + 4096) << "the update copied a gradient";
  EXPECT_LE(meter.live_bytes() - before, 64);
}

TEST_F(AccumulationPitfall, OutOfMemoryLosesTheWindowOrItsBytes) {
  MemoryMeter& meter = MemoryMeter::instance();
  auto big = torch::nn::Linear(256, 256);
  const at::Tensor x = torch::randn({64, 256});
  torch::optim::SGD optimizer(big->parameters(), torch::optim::SGDOptions(0.1));
  GradientAccumulator accumulator(optimizer, 2);
  const at::Tensor before = big->weight.detach().clone();
  const std::int64_t live_bytes = meter.live_bytes();
  const auto micro_batch = [&] { return big(x).tanh().pow(2).mean(); };

  accumulator.backward(micro_batch(), 64);
  {
    const at::Tensor loss = micro_batch();
    meter.set_cap(meter.live_bytes() + 1024);
    EXPECT_THROW(accumulator.backward(loss, 64), c10::Error);
    meter.set_cap(0);
  }
  accumulator.discard();
  EXPECT_EQ(meter.live_bytes(), live_bytes);
  EXPECT_TRUE(big->weight.equal(before));

  const at::Tensor expected =
      before - 0.1 * torch::autograd::grad({micro_batch()}, {big->weight})[0];
  accumulator.backward(micro_batch(), 64);
  EXPECT_TRUE(accumulator.backward(micro_batch(), 64));
  EXPECT_TRUE(torch::allclose(big->weight, expected, 1e-6, 1e-7));
}

TEST_F(AccumulationPitfall, OptimizerInBackwardIsSilentlyWrong) {
  const at::Tensor w = torch::zeros({3}, torch::requires_grad());
  torch::optim::SGD in_backward({w}, torch::optim::SGDOptions(0.1));
  const auto node = torch::autograd::impl::grad_accumulator(w);
  struct StepAndFree : torch::autograd::FunctionPostHook {
    StepAndFree(at::Tensor parameter, torch::optim::Optimizer& optimizer)
        : parameter_(std::move(parameter)), optimizer_(optimizer) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      optimizer_.step();
      parameter_.mutable_grad() = at::Tensor();
      return outputs;
    }
    at::Tensor parameter_;
    torch::optim::Optimizer& optimizer_;
  };
  node->add_post_hook(std::make_unique<StepAndFree>(w, in_backward));

  torch::optim::SGD optimizer({w}, torch::optim::SGDOptions(0.1));
  GradientAccumulator accumulator(optimizer, 4);
  try {
    accumulator.backward(w.sum(), 1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("steps in backward"), std::string::npos)
        << error.what();
  }
}

TEST_F(AccumulationPitfall, SteppedByHandInsideAWindow) {
  GradientAccumulator accumulator(optimizer_, 4);
  accumulator.backward(loss(0, 2), items(0, 2));
  optimizer_.step();
  EXPECT_THROW(accumulator.backward(loss(2, 4), items(2, 4)), Error);
}

/// A user's own optimizer: sign descent.
class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(0.5)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined())
          parameter.sub_(parameter.grad().sign(), group.options().get_lr());
      }
    }
    return {};
  }
};

TEST_F(AccumulationPitfall, OnlyKnownOptimizersAreServed) {
  const auto gradients = large_batch_gradients(0, 8);
  const auto before = weights();
  SignDescent optimizer(model_->parameters());
  GradientAccumulator accumulator(optimizer, 4);
  for (std::int64_t i = 0; i < 8; i += 2) accumulator.backward(loss(i, i + 2), items(i, i + 2));
  const auto after = weights();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(torch::equal(before[i] - 0.5 * gradients[i].sign(), after[i])) << "parameter " << i;
  }
}

}  // namespace
}  // namespace headroom
