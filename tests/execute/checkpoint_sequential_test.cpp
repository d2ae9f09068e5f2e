#include <headroom/execute/checkpoint.h>

#include <headroom/plan/schedule.h>
#include "plan/segments.h"

#include <cmath>
#include <cstdio>

#include "execute/checkpoint_support.h"

namespace headroom {
namespace {

using namespace torch::nn;  // NOLINT(google-build-using-namespace): the test reads as a list of
                            // LibTorch models
using testing::expect_identical;
using testing::Outcome;
using testing::peak_of;
using testing::run_step;
using torch::Tensor;

using Bounds = std::vector<std::pair<std::size_t, std::size_t>>;

std::vector<std::pair<std::size_t, std::size_t>> bounds(const CheckpointStrategy& strategy,
                                                        std::size_t num_layers) {
  std::vector<std::pair<std::size_t, std::size_t>> result;
  for (const CheckpointSegment& segment : strategy.segments(num_layers))
    result.emplace_back(segment.begin, segment.end);
  return result;
}

TEST(CheckpointStrategyTest, Segments) {
  EXPECT_EQ(bounds(CheckpointStrategy::every(), 3), (Bounds{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(bounds(3, 7), (Bounds{{0, 2}, {2, 4}, {4, 7}}));
  EXPECT_EQ(bounds(9, 2), (Bounds{{0, 1}, {1, 2}})) << "no more segments than layers";
  EXPECT_EQ(bounds(std::vector<std::int64_t>{1, 4}, 6), (Bounds{{0, 1}, {1, 4}, {4, 6}}));
  EXPECT_EQ(bounds(CheckpointStrategy::sqrt(), 16).size(), 4u);
  EXPECT_EQ(bounds(CheckpointStrategy::log(), 5), (Bounds{{0, 3}, {3, 5}}));
  EXPECT_EQ(CheckpointStrategy::log().segments(5)[0].inner.size(), 2u);
  EXPECT_EQ(bounds(CheckpointStrategy::log(), 1), (Bounds{{0, 1}}));
}

// A policy of a plan recomputes every stage but those of the last segment, and so inside of each.
std::int64_t num_recomputed(const std::vector<CheckpointSegment>& segments) {
  if (segments.empty()) return 0;
  auto count = static_cast<std::int64_t>(segments.back().begin - segments.front().begin);
  for (const CheckpointSegment& segment : segments) count += num_recomputed(segment.inner);
  return count;
}

TEST(CheckpointStrategyTest, CutsAsThePoliciesOfPlansDo) {
  for (const std::size_t num_layers : {1, 2, 5, 10, 17}) {
    ChainCosts chain;
    for (std::size_t l = 1; l <= num_layers; ++l)
      chain.stages.push_back({"", 1, l == num_layers ? 0 : 1, 1, 0, 0, {{3, 1, 2, 0, 0}}, {}});
    const auto check = [&](const std::string& policy, const CheckpointStrategy& strategy) {
      const std::int64_t time_ns =
          static_cast<std::int64_t>(3 * num_layers) + num_recomputed(strategy.segments(num_layers));
      EXPECT_EQ(schedule_of_policy(chain, parse_policy(policy)).time_ns, time_ns)
          << policy << " of " << num_layers;
    };
    for (int count = 1; count <= static_cast<int>(num_layers); ++count)
      check("segments=" + std::to_string(count), count);
    check("sqrt", CheckpointStrategy::sqrt());
    check("log", CheckpointStrategy::log());
    check("every", CheckpointStrategy::every());
  }
  EXPECT_EQ(bounds(4, 10), (Bounds{{0, 2}, {2, 5}, {5, 7}, {7, 10}}));
}

TEST(CheckpointStrategyTest, NonsenseIsRefused) {
  EXPECT_THROW(CheckpointStrategy(0), ConfigError);
  EXPECT_THROW(CheckpointStrategy(-2), ConfigError);
  EXPECT_THROW(CheckpointStrategy::every().segments(0), ConfigError);
  for (const std::vector<std::int64_t>& cuts :
       {std::vector<std::int64_t>{0}, {3, 2}, {2, 2}, {6}, {-1}}) {
    EXPECT_THROW(CheckpointStrategy(cuts).segments(6), ConfigError);
  }
}

std::vector<CheckpointStrategy> all_strategies() {
  return {CheckpointStrategy::every(),
          CheckpointStrategy(1),
          CheckpointStrategy(3),
          CheckpointStrategy(std::vector<std::int64_t>{2, 3}),
          CheckpointStrategy::sqrt(),
          CheckpointStrategy::log(),
          CheckpointStrategy(3).checkpoint_last(false)};
}

TEST(CheckpointSequentialTest, EveryStrategyGivesTheSameNumbers) {
  torch::manual_seed(1);
  Sequential model(Linear(6, 12), Tanh(), Dropout(0.2), BatchNorm1d(12), Linear(12, 12), GELU(),
                   Linear(12, 3));
  const Tensor x = torch::randn({5, 6}).requires_grad_();
  const Outcome plain = run_step(*model, {x}, [&] { return model->forward(x).pow(2).mean(); });
  for (const CheckpointStrategy& strategy : all_strategies()) {
    expect_identical(
        run_step(*model, {x},
                 [&] { return checkpoint_sequential(model, strategy, x).pow(2).mean(); }),
        plain);
  }
}

struct SplitImpl : Module {
  std::tuple<Tensor, Tensor> forward(const Tensor& a, const Tensor& b) {
    return {torch::tanh(a) * b, a.exp()};
  }
};
TORCH_MODULE(Split);
struct MixImpl : Module {
  std::tuple<Tensor, Tensor> forward(const std::tuple<Tensor, Tensor>& in) {
    return {std::get<0>(in).sin(), linear(std::get<1>(in)).tanh()};
  }
  Linear linear = register_module("linear", Linear(4, 4));
};
TORCH_MODULE(Mix);
struct JoinImpl : Module {
  Tensor forward(const std::tuple<Tensor, Tensor>& in) {
    return std::get<0>(in) * std::get<1>(in).sigmoid();
  }
};
TORCH_MODULE(Join);

TEST(CheckpointSequentialTest, SeveralInputsAndTuplesBetweenLayers) {
  torch::manual_seed(2);
  Sequential model((Split()), Mix(), Mix(), Mix(), Join());
  const Tensor a = torch::randn({3, 4}).requires_grad_(), b = torch::randn({3, 4});
  const Outcome plain = run_step(*model, {a}, [&] { return model->forward(a, b).pow(2).sum(); });
  for (const CheckpointStrategy& strategy : all_strategies()) {
    expect_identical(
        run_step(*model, {a},
                 [&] { return checkpoint_sequential(model, strategy, a, b).pow(2).sum(); }),
        plain);
  }
  Sequential pair((Split()), Mix());
  const auto result = checkpoint_sequential<std::tuple<Tensor, Tensor>>(pair, 2, a, b);
  EXPECT_EQ(std::get<1>(result).size(1), 4);
}

// Keeps three tensors of its input's size.
struct BlockImpl : Module {
  Tensor forward(const Tensor& x) { return torch::tanh(torch::sigmoid(x * 1.1) * torch::tanh(x)); }
};
TORCH_MODULE(Block);

std::int64_t activation_peak(int num_blocks, const CheckpointStrategy* strategy) {
  Sequential chain;
  for (int i = 0; i < num_blocks; ++i) chain->push_back(Block());
  const Tensor x = torch::randn({1024}).requires_grad_();
  return peak_of([&] {
    (strategy ? checkpoint_sequential(chain, *strategy, x) : chain->forward(x)).sum().backward();
  });
}

TEST(CheckpointSequentialTest, TheLastSegmentIsCheckpointedToo) {
  const CheckpointStrategy one(1);
  CheckpointStrategy open(1);
  open.checkpoint_last(false);
  Sequential chain;
  for (int i = 0; i < 10; ++i) chain->push_back(Block());
  const Tensor x = torch::randn({1024}).requires_grad_();
  MemoryMeter& meter = MemoryMeter::instance();
  const auto kept = [&](const CheckpointStrategy& strategy) {
    const std::int64_t base = meter.live_bytes();
    const Tensor y = checkpoint_sequential(chain, strategy, x);
    return meter.live_bytes() - base;
  };
  EXPECT_EQ(kept(one), 4096) << "only the output";
  EXPECT_EQ(kept(open), 10 * 3 * 4096) << "all that its blocks keep";
}

struct Fit {
  double offset, slope, worst;  // worst: largest relative error
};

// Least squares of y = offset + slope * x.
Fit fit_line(const std::vector<double>& x, const std::vector<double>& y) {
  const auto count = static_cast<double>(x.size());
  double sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum_x += x[i], sum_y += y[i], sum_xx += x[i] * x[i], sum_xy += x[i] * y[i];
  Fit fit{};
  fit.slope = (count * sum_xy - sum_x * sum_y) / (count * sum_xx - sum_x * sum_x);
  fit.offset = (sum_y - fit.slope * sum_x) / count;
  for (std::size_t i = 0; i < x.size(); ++i)
    fit.worst = std::max(fit.worst, std::abs(fit.offset + fit.slope * x[i] - y[i]) / y[i]);
  return fit;
}

void expect_growth(const char* name, const CheckpointStrategy* strategy, double (*growth)(double),
                   double largest_error) {
  std::vector<double> x, y;
  std::printf("%-8s", name);
  for (int num_blocks = 16; num_blocks <= 1024; num_blocks *= 2) {
    x.push_back(growth(num_blocks));
    y.push_back(static_cast<double>(activation_peak(num_blocks, strategy)) / 4096);  // in tensors
    std::printf(" %4d: %6.0f", num_blocks, y.back());
  }
  const Fit fit = fit_line(x, y);
  std::printf("   fit %.1f + %.2f f(n), off by at most %.1f%%\n", fit.offset, fit.slope,
              100 * fit.worst);
  EXPECT_LE(fit.worst, largest_error) << name;
  EXPECT_GT(fit.slope, 0) << name;
}

TEST(CheckpointSequentialTest, PeakGrowsAsPromised) {
  std::printf("peak of a chain of n blocks, in tensors of one activation\n");
  const CheckpointStrategy every = CheckpointStrategy::every(), sqrt = CheckpointStrategy::sqrt(),
                           log = CheckpointStrategy::log();
  expect_growth(
      "plain", nullptr, [](double n) { return n; }, 0.05);
  expect_growth(
      "every", &every, [](double n) { return n; }, 0.05);
  expect_growth(
      "sqrt", &sqrt, [](double n) { return std::sqrt(n); }, 0.05);
  expect_growth(
      "log", &log, [](double n) { return std::log2(n); }, 0.05);
}

}  // namespace
}  // namespace headroom
