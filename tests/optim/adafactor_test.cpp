#include "optim/adafactor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include <headroom/core/error.h>
#include "optim/reference.h"

namespace headroom {
namespace {

using testing::expect_independent_of_threads;
using testing::ReferencePair;
using testing::Shapes;

/// Algorithms 4 and 5 of Shazeer and Stern (2018), in double and in the plainest form: R and C as
/// vectors, V as the full matrix.
class PaperAdafactor {
 public:
  PaperAdafactor(std::vector<at::Tensor> parameters, const AdafactorOptions& options)
      : parameters_(std::move(parameters)), options_(options), moments_(parameters_.size()) {}

  void step() {
    ++t_;
    for (std::size_t i = 0; i < parameters_.size(); ++i) update(parameters_[i], moments_[i]);
  }

 private:
  struct Moments {
    at::Tensor row, column, full, first;
  };

  static double rms(const at::Tensor& x) { return std::sqrt(x.pow(2).mean().item<double>()); }

  void update(at::Tensor& parameter, Moments& moments) const {
    torch::NoGradGuard no_grad;
    if (parameter.numel() == 0) return;
    const at::Tensor x = parameter.to(torch::kDouble);
    const at::Tensor g = parameter.grad().to(torch::kDouble);
    const double t = t_;
    double rho = options_.lr();
    if (options_.relative_step())
      rho = std::min(options_.warmup_init() ? 1e-6 * t : 1e-2, 1 / std::sqrt(t));
    const double alpha =
        options_.scale_parameter() ? std::max(std::get<1>(options_.eps()), rms(x)) * rho : rho;
    const double beta2 = 1 - std::pow(t, options_.decay_rate());
    const at::Tensor square = g.pow(2) + std::get<0>(options_.eps());
    at::Tensor v;
    if (parameter.dim() >= 2) {
      const at::Tensor matrix = square.reshape({square.size(0), -1});
      moments.row = average(moments.row, matrix.sum(1), beta2);
      moments.column = average(moments.column, matrix.sum(0), beta2);
      v = (moments.row.unsqueeze(1) * moments.column.unsqueeze(0) / moments.row.sum())
              .reshape(g.sizes());
    } else {
      moments.full = average(moments.full, square, beta2);
      v = moments.full;
    }
    const at::Tensor u = g / v.sqrt();
    at::Tensor delta = alpha * u / std::max(1.0, rms(u) / options_.clip_threshold());
    if (options_.beta1() > 0)
      delta = moments.first = average(moments.first, delta, options_.beta1());
    parameter.copy_(x - options_.weight_decay() * alpha * x - delta);
  }

  static at::Tensor average(const at::Tensor& old, const at::Tensor& now, double beta) {
    return old.defined() ? beta * old + (1 - beta) * now : (1 - beta) * now;
  }

  std::vector<at::Tensor> parameters_;
  AdafactorOptions options_;
  std::vector<Moments> moments_;
  int t_ = 0;
};

TEST(Adafactor, EqualsThePapersFormulas) {
  const std::vector<AdafactorOptions> cases = {
      AdafactorOptions(),
      AdafactorOptions().warmup_init(true).weight_decay(0.1),
      AdafactorOptions(1e-3).scale_parameter(false),
      AdafactorOptions(1e-2).weight_decay(0.01).clip_threshold(0.5).decay_rate(-0.6),
      AdafactorOptions(1e-3).beta1(0.9).scale_parameter(false),
      AdafactorOptions().beta1(0.5).weight_decay(0.05),
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Shapes shapes = testing::many_shapes();
    shapes.push_back({5, 8200});  // more than one tile of columns
    ReferencePair pair(shapes);
    Adafactor ours(pair.ours, cases[i]);
    PaperAdafactor paper(pair.theirs, cases[i]);
    for (int step = 0; step < 100; ++step) {
      pair.give_gradients(step);
      ours.step();
      paper.step();
      ASSERT_LE(pair.largest_relative_difference(), 3e-6) << "case " << i << " after step " << step;
    }
  }
}

TEST(Adafactor, OtherTypesAndLayoutsTakeThePlainPath) {
  for (const auto& options :
       {AdafactorOptions(), AdafactorOptions(1e-3).beta1(0.9).weight_decay(0.1)}) {
    ReferencePair pair(Shapes{{24, 10}, {9}});
    std::vector<at::Tensor> doubles;
    for (const auto& p : pair.ours)
      doubles.push_back(p.detach().to(torch::kDouble).requires_grad_());
    Adafactor ours(pair.ours, options);
    Adafactor plain(doubles, options);
    for (int step = 0; step < 20; ++step) {
      pair.give_gradients(step);
      for (std::size_t i = 0; i < doubles.size(); ++i)
        doubles[i].mutable_grad() = pair.ours[i].grad().to(torch::kDouble);
      ours.step();
      plain.step();
    }
    for (std::size_t i = 0; i < doubles.size(); ++i)
      EXPECT_LE((doubles[i] - pair.ours[i]).abs().max().item<double>(), 2e-6);
  }
}

TEST(Adafactor, DoesNotDependOnTheNumberOfThreads) {
  expect_independent_of_threads<Adafactor>({{700, 333}, {70001}});
}

TEST(Adafactor, SurvivesZeroGradients) {
  const at::Tensor matrix = torch::ones({4, 6}, torch::requires_grad());
  const at::Tensor vector = torch::ones({6}, torch::requires_grad());
  Adafactor optimizer({matrix, vector});
  for (int step = 0; step < 3; ++step) {
    matrix.mutable_grad() = torch::zeros({4, 6});
    vector.mutable_grad() = torch::zeros({6});
    optimizer.step();
  }
  EXPECT_TRUE(torch::equal(matrix, torch::ones({4, 6})));
  EXPECT_TRUE(torch::equal(vector, torch::ones({6})));
}

TEST(Adafactor, RefusesWhatItCannotServe) {
  const std::vector<at::Tensor> parameters = {torch::zeros({3}, torch::requires_grad())};
  EXPECT_THROW(Adafactor(parameters, AdafactorOptions(1e-3).warmup_init(true)), ConfigError);
  EXPECT_THROW(Adafactor(parameters, AdafactorOptions(1e-3).clip_threshold(0)), ConfigError);
  EXPECT_THROW(Adafactor(parameters, AdafactorOptions(1e-3).beta1(1)), ConfigError);
  EXPECT_THROW(Adafactor(parameters, AdafactorOptions(1e-3).decay_rate(0.8)), ConfigError);
}

}  // namespace
}  // namespace headroom
