// Whole small trainings: what the lean optimizers end at, against AdamW on the same batches from
// the same weights.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <numeric>
#include <sstream>

#include <headroom/core/runtime.h>
#include <headroom/data/dataset.h>
#include <headroom/optim/optimizer.h>
#include <headroom/optim/schedule.h>
#include "support/transformer.h"

namespace headroom {
namespace {

constexpr int kNumUpdates = 300;

NamedParameters parameters_of(const torch::nn::Module& module) {
  NamedParameters result;
  for (const auto& item : module.named_parameters()) result.emplace_back(item.key(), item.value());
  return result;
}

OptimizerConfig config_of(const std::string& name, double learning_rate) {
  OptimizerConfig config;
  config.name = name;
  config.learning_rate = learning_rate;
  config.weight_decay = 0.01;
  return config;
}

void set_rate(torch::optim::Optimizer& optimizer, double learning_rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate);
}

/// Token embedding, positions, causal blocks and a head.
class CausalGptImpl : public torch::nn::Module {
 public:
  CausalGptImpl(std::int64_t vocabulary, std::int64_t width, std::int64_t length, int num_blocks)
      : tokens_(register_module("tokens", torch::nn::Embedding(vocabulary, width))),
        positions_(register_module("positions", torch::nn::Embedding(length, width))),
        norm_(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head_(register_module(
            "head", torch::nn::Linear(torch::nn::LinearOptions(width, vocabulary).bias(false)))),
        mask_(torch::ones({length, length}, torch::kBool).triu(1)) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks_.push_back(
          register_module("block" + std::to_string(i), testing::TransformerBlock(width, 4, 0.0)));
    }
  }

  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& targets) {
    at::Tensor x = tokens_(inputs) + positions_(torch::arange(inputs.size(1)));  // (B, T, C)
    for (auto& block : blocks_) x = block->forward(x, mask_);
    return torch::nn::functional::cross_entropy(head_(norm_(x)).flatten(0, 1), targets.flatten());
  }

 private:
  torch::nn::Embedding tokens_, positions_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
  at::Tensor mask_;
  std::vector<testing::TransformerBlock> blocks_;
};
TORCH_MODULE(CausalGpt);

/// Tokens with structure to learn: each of 64 has a few likely successors, which depend on the
/// token before it as well.
at::Tensor make_text(std::int64_t length) {
  torch::manual_seed(77);
  constexpr std::int64_t kVocabulary = 64;
  const at::Tensor likely = torch::randint(kVocabulary, {kVocabulary, 4, 3});
  const at::Tensor choice = torch::randint(3, {length});
  const at::Tensor surprise = torch::rand({length});
  const at::Tensor random = torch::randint(kVocabulary, {length});
  at::Tensor text = torch::zeros({length}, torch::kLong);
  auto out = text.accessor<std::int64_t, 1>();
  const auto next = likely.accessor<std::int64_t, 3>();
  for (std::int64_t i = 2; i < length; ++i) {
    out[i] = surprise[i].item<float>() < 0.1f
                 ? random[i].item<std::int64_t>()
                 : next[out[i - 1]][out[i - 2] % 4][choice[i].item<std::int64_t>()];
  }
  return text;
}

constexpr std::int64_t kLength = 64;
constexpr std::int64_t kBatch = 8;

/// The mean loss over the last 50 updates. With `interrupt`, the optimizer goes through an archive
/// in the middle.
double train_gpt(const std::string& optimizer_name, double learning_rate, const at::Tensor& text,
                 int num_updates = kNumUpdates, bool interrupt = false,
                 ScheduleKind schedule = ScheduleKind::kConstant) {
  torch::manual_seed(5);
  CausalGpt model(64, 64, kLength, 2);
  auto optimizer = make_optimizer(config_of(optimizer_name, learning_rate), parameters_of(*model));
  const LearningRateSchedule factors(schedule, num_updates);
  double sum = 0;
  for (int update = 0; update < num_updates; ++update) {
    set_rate(*optimizer, learning_rate * factors.at(update));
    torch::manual_seed(1000 + update);
    const at::Tensor starts = torch::randint(text.size(0) - kLength - 1, {kBatch, 1});
    const at::Tensor places = starts + torch::arange(kLength + 1).unsqueeze(0);  // (B, T + 1)
    const at::Tensor window = text.index({places});
    const at::Tensor loss =
        model->loss(window.slice(1, 0, kLength), window.slice(1, 1, kLength + 1));
    testing::clear_gradients(*model);
    loss.backward();
    optimizer->step();
    if (update >= num_updates - 50) sum += loss.item<double>() / 50;
    if (interrupt && update == num_updates / 2) {
      std::stringstream archive;
      torch::save(*optimizer, archive);
      optimizer = make_optimizer(config_of(optimizer_name, learning_rate), parameters_of(*model));
      torch::load(*optimizer, archive);
    }
  }
  return sum;
}

class SmallGptTraining : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    configure_threads(1);  // the work is small: more threads would mostly wait for each other
    text_ = make_text(20000);
    adamw_loss_ = train_gpt("adamw", 2e-3, text_);
    RecordProperty("adamw_loss", std::to_string(adamw_loss_));
  }
  static inline at::Tensor text_;
  static inline double adamw_loss_ = 0;
};

TEST_F(SmallGptTraining, AdamWLearns) {
  EXPECT_LT(adamw_loss_, 0.75 * std::log(64.0))
      << "the task is not learnt, so that it cannot tell optimizers apart";
}

TEST_F(SmallGptTraining, AdamW8bitEndsWithin1PercentOfAdamW) {
  const double loss = train_gpt("adamw_8bit", 2e-3, text_);
  std::printf("AdamW %.4f, AdamW8bit %.4f (%+.2f%%)\n", adamw_loss_, loss,
              100 * (loss / adamw_loss_ - 1));
  EXPECT_NEAR(loss, adamw_loss_, 0.01 * adamw_loss_);
}

TEST_F(SmallGptTraining, AdamW8bitDoesNotDriftOverSaveAndLoad) {
  EXPECT_EQ(train_gpt("adamw_8bit", 2e-3, text_, 100, /*interrupt=*/true),
            train_gpt("adamw_8bit", 2e-3, text_, 100));
}

// The trainer's own schedule for both: the rate falls to 0 in a straight line, which is what
// Adafactor without a first moment needs.
TEST_F(SmallGptTraining, AdafactorEndsWithin2PercentOfAdamW) {
  for (const double rate : {1e-3, 2e-3, 3e-3}) {
    const double adamw = train_gpt("adamw", rate, text_, kNumUpdates, false, ScheduleKind::kLinear);
    const double adafactor =
        train_gpt("adafactor", rate, text_, kNumUpdates, false, ScheduleKind::kLinear);
    std::printf("rate %g: AdamW %.4f, Adafactor %.4f (%+.2f%%)\n", rate, adamw, adafactor,
                100 * (adafactor / adamw - 1));
    EXPECT_LE(adafactor, 1.02 * adamw) << rate;
  }
}

/// The mean training loss over the last 200 updates of an epoch.
double train_on_images(const Dataset& images, const std::string& optimizer_name,
                       double learning_rate, ScheduleKind schedule) {
  constexpr std::int64_t kImageBatch = 100;
  torch::manual_seed(6);
  torch::nn::Sequential model(torch::nn::Flatten(), torch::nn::Linear(784, 256), torch::nn::ReLU(),
                              torch::nn::Linear(256, 256), torch::nn::ReLU(),
                              torch::nn::Linear(256, 10));
  auto optimizer = make_optimizer(config_of(optimizer_name, learning_rate), parameters_of(*model));
  const std::int64_t num_updates = images.size() / kImageBatch;
  const LearningRateSchedule factors(schedule, num_updates);
  double sum = 0;
  const at::Tensor order = torch::randperm(images.size());
  for (std::int64_t update = 0; update < num_updates; ++update) {
    const at::Tensor indices =
        order.slice(0, update * kImageBatch, (update + 1) * kImageBatch).contiguous();
    const MicroBatch batch =
        images.load({indices.data_ptr<std::int64_t>(), static_cast<std::size_t>(kImageBatch)});
    const at::Tensor loss = torch::nn::functional::cross_entropy(model->forward(batch.inputs.at(0)),
                                                                 batch.targets.at(0));
    testing::clear_gradients(*model);
    loss.backward();
    set_rate(*optimizer, learning_rate * factors.at(update));
    optimizer->step();
    if (update >= num_updates - 200) sum += loss.item<double>() / 200;
  }
  return sum;
}

TEST(FashionMnistTraining, AdafactorEndsWithin2PercentOfAdamW) {
  const std::string folder = "/usr/share/datasets/fashion-mnist";  // Debian's dataset-fashion-mnist
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  configure_threads(1);  // the work is small: more threads would mostly wait for each other
  const auto images = open_idx_images(folder, /*train=*/true);
  for (const double rate : {5e-4, 1e-3, 2e-3}) {
    const double adamw = train_on_images(*images, "adamw", rate, ScheduleKind::kLinear);
    const double adafactor = train_on_images(*images, "adafactor", rate, ScheduleKind::kLinear);
    std::printf("rate %g: AdamW %.4f, Adafactor %.4f (%+.2f%%)\n", rate, adamw, adafactor,
                100 * (adafactor / adamw - 1));
    EXPECT_LE(adafactor, 1.02 * adamw) << rate;
  }
  const double adamw = train_on_images(*images, "adamw", 1e-3, ScheduleKind::kLinear);
  EXPECT_NEAR(train_on_images(*images, "adamw_8bit", 1e-3, ScheduleKind::kLinear), adamw,
              0.02 * adamw);
}

}  // namespace
}  // namespace headroom
