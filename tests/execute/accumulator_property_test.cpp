// Accumulation equals the large batch: hundreds of random models, batches, splits, paddings, losses
// and optimizers.

#include <headroom/execute/accumulator.h>

#include <algorithm>
#include <memory>
#include <random>
#include <sstream>

#include "execute/padding.h"

namespace headroom {
namespace {

using testing::kPadding;

constexpr std::int64_t kNumTokens = 13;

struct Case {
  explicit Case(std::uint64_t seed) : random(seed) {
    type = chance(0.5) ? torch::kDouble : torch::kFloat;
    width = number(1, 12);
    depth = number(0, 3);
    layer_norm = chance(0.5) && width > 2;
    tied = chance(0.3);
    length = number(1, 9);
    summed = chance(0.5);
    max_norm = chance(0.5) ? 0.0 : (chance(0.5) ? 0.05 : 1.0);
    optimizer = number(0, 4);
    steps = number(1, 6);
    num_windows = number(2, 4);
    padding = std::uniform_real_distribution<>(0, 1)(random);
  }

  std::int64_t number(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(random); }

  std::string describe() const {
    std::ostringstream text;
    text << type << " width " << width << " depth " << depth << " norm " << layer_norm << " tied "
         << tied << " length " << length << " summed " << summed << " max_norm " << max_norm
         << " optimizer " << optimizer << " steps " << steps << " windows " << num_windows
         << " padding " << padding;
    return text.str();
  }

  std::mt19937_64 random;
  torch::ScalarType type;
  std::int64_t width, depth, length, optimizer, steps, num_windows;
  bool layer_norm, tied, summed;
  double max_norm, padding;
};

/// A small language model: embedding, layers, head (perhaps the embedding's own weight).
class ModelImpl : public torch::nn::Module {
 public:
  explicit ModelImpl(const Case& c)
      : embedding_(register_module("embedding", torch::nn::Embedding(kNumTokens, c.width))) {
    for (std::int64_t i = 0; i < c.depth; ++i) {
      if (c.layer_norm)
        layers_->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({c.width})));
      layers_->push_back(torch::nn::Linear(c.width, c.width));
      layers_->push_back(torch::nn::Tanh());
    }
    layers_->push_back(torch::nn::Identity());
    register_module("layers", layers_);
    if (!c.tied) head_ = register_module("head", torch::nn::Linear(c.width, kNumTokens));
    to(c.type);
  }

  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, bool summed) {
    const at::Tensor x = layers_->forward(embedding_(tokens));  // (B, T, C)
    const at::Tensor logits = head_.is_empty() ? x.matmul(embedding_->weight.t()) : head_(x);
    auto options = torch::nn::functional::CrossEntropyFuncOptions().ignore_index(kPadding);
    if (summed) options.reduction(torch::kSum);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten(), options);
  }

 private:
  torch::nn::Embedding embedding_;
  torch::nn::Sequential layers_;
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Model);

std::unique_ptr<torch::optim::Optimizer> make_optimizer(std::int64_t kind,
                                                        const std::vector<at::Tensor>& parameters) {
  switch (kind) {
    case 0:
      return std::make_unique<torch::optim::SGD>(
          parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    case 1:
      return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-3));
    case 2:
      return std::make_unique<torch::optim::AdamW>(
          parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
    case 3:
      return std::make_unique<torch::optim::RMSprop>(parameters,
                                                     torch::optim::RMSpropOptions(1e-3));
    default:
      return std::make_unique<torch::optim::Adagrad>(parameters,
                                                     torch::optim::AdagradOptions(1e-2));
  }
}

/// Sizes of `num_parts` micro-batches, at random.
std::vector<std::int64_t> random_sizes(Case& c, std::int64_t num_parts) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < num_parts; ++i) sizes.push_back(c.number(1, 5));
  return sizes;
}

struct Expected {
  double loss, grad_norm;
};

/// One update with the whole batch at once, by LibTorch alone.
Expected update_at_once(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& tokens,
                        const at::Tensor& targets, double max_norm) {
  for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  const at::Tensor loss = model->loss(tokens, targets, /*summed=*/false);
  loss.backward();
  const double grad_norm =
      torch::nn::utils::clip_grad_norm_(model->parameters(), max_norm > 0 ? max_norm : 1e30);
  optimizer.step();
  return {loss.item<double>(), grad_norm};
}

/// |a - b| / |b|, over all weights.
double relative_difference(const Model& a, const Model& b) {
  double difference = 0, size = 0;
  const auto left = a->parameters(), right = b->parameters();
  for (std::size_t i = 0; i < left.size(); ++i) {
    difference += (left[i] - right[i]).to(torch::kDouble).square().sum().item<double>();
    size += right[i].to(torch::kDouble).square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

/// Runs one case; returns the relative difference of the weights at the end.
double run_case(Case& c) {
  Model ours(c);
  Model reference(c);
  {
    const torch::NoGradGuard no_grad;
    const auto from = ours->parameters(), to = reference->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  const auto our_optimizer = make_optimizer(c.optimizer, ours->parameters());
  const auto reference_optimizer = make_optimizer(c.optimizer, reference->parameters());
  AccumulatorOptions options;
  options.loss_reduction = c.summed ? LossReduction::kSum : LossReduction::kMean;
  options.max_grad_norm = c.max_norm;
  GradientAccumulator accumulator(*our_optimizer, c.steps, options);

  for (std::int64_t window = 0; window < c.num_windows; ++window) {
    const bool partial = window + 1 == c.num_windows && c.steps > 1;
    const std::vector<std::int64_t> sizes =
        random_sizes(c, partial ? c.number(1, c.steps - 1) : c.steps);
    std::int64_t num_samples = 0;
    for (const std::int64_t size : sizes) num_samples += size;
    const at::Tensor tokens = torch::randint(kNumTokens, {num_samples, c.length});
    at::Tensor targets = torch::randint(kNumTokens, {num_samples, c.length});
    targets.masked_fill_(torch::rand({num_samples, c.length}) < c.padding, kPadding);
    for (std::int64_t i = 0; i < num_samples; ++i) {
      if (c.chance(0.3)) targets[i].fill_(kPadding);
    }
    const std::int64_t num_items = targets.ne(kPadding).sum().item<std::int64_t>();
    Expected expected{};
    if (num_items > 0)
      expected = update_at_once(reference, *reference_optimizer, tokens, targets, c.max_norm);

    bool updated = false;
    std::int64_t start = 0;
    for (const std::int64_t size : sizes) {
      const at::Tensor target = targets.narrow(0, start, size);
      EXPECT_FALSE(updated);
      updated = accumulator.backward(ours->loss(tokens.narrow(0, start, size), target, c.summed),
                                     target.ne(kPadding).sum().item<std::int64_t>());
      start += size;
    }
    if (partial) updated = accumulator.flush();
    EXPECT_EQ(updated, num_items > 0);
    EXPECT_EQ(accumulator.last_window().items, num_items);
    EXPECT_EQ(accumulator.num_pending(), 0);
    if (num_items > 0) {
      const double tolerance =
          c.type == torch::kDouble ? 1e-12 : 1e-4;  // of single sums, not of all weights together
      EXPECT_NEAR(accumulator.last_window().loss, expected.loss, tolerance * expected.loss);
      EXPECT_NEAR(accumulator.last_window().grad_norm, expected.grad_norm,
                  tolerance * expected.grad_norm);
    }
  }
  EXPECT_EQ(accumulator.num_skipped_updates(), 0);
  return relative_difference(ours, reference);
}

TEST(AccumulationProperty, EqualsTheLargeBatchInHundredsOfRandomCases) {
  double worst_double = 0, worst_float = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    torch::manual_seed(seed);
    Case c(seed);
    const double difference = run_case(c);
    EXPECT_LE(difference, c.type == torch::kDouble ? 1e-12 : 1e-5)
        << "seed " << seed << ": " << c.describe();
    double& worst = c.type == torch::kDouble ? worst_double : worst_float;
    worst = std::max(worst, difference);
  }
  std::printf("largest relative difference: %.2e in double, %.2e in float\n", worst_double,
              worst_float);
}

}  // namespace
}  // namespace headroom
