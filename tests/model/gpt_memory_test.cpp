// What a block keeps for backward, to the byte, against the table in docs/kernels.md.

#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/ops/transformer.h>
#include "ops/direct_gradient.h"

#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using torch::Tensor;

constexpr std::int64_t kGptSamples = 2, kGptLength = 48, kGptHeads = 4, kGptWidth = 64,
                       kGptTokens = kGptSamples * kGptLength;

Chain one_block() {
  return make_gpt(gpt_config("gpt", "n_layer=1,n_head=4,n_embd=64,block_size=48,vocab_size=100"));
}

TEST(GptMemory, ABlockKeepsWhatTheTableSays) {
  const MemoryMeter& meter = MemoryMeter::instance();
  const Chain chain = one_block();
  const Tensor x = torch::randn({kGptSamples, kGptLength, kGptWidth}).requires_grad_(true);
  const std::vector<std::int64_t> widths{16, 12, 10, 7,
                                         3};  // floats per token, in units of the width
  for (std::size_t option = 0; option < widths.size(); ++option) {
    const std::int64_t before = meter.live_bytes();
    const Tensor y = chain.stage(1).forward({x}, {}, static_cast<int>(option)).at(0);
    // Two norms with a mean and a deviation each, and the maximum and sum of one softmax per head.
    const std::int64_t floats = widths[option] * kGptWidth + 4 + 2 * kGptHeads;
    EXPECT_EQ(meter.live_bytes() - before, kGptTokens * floats * 4)
        << chain.stage(1).options()[option];
  }
  const torch::NoGradGuard no_grad;
  const std::int64_t before = meter.live_bytes();
  const Tensor y = chain.stage(1).forward({x}, {}, 0).at(0);
  EXPECT_EQ(meter.live_bytes() - before, kGptTokens * kGptWidth * 4) << "without gradients";
}

// The most bytes above what is live before, while `run` runs.
template <class Run>
std::int64_t peak_of(const Run& run) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  run();
  return meter.peak_bytes() - before;
}

TEST(GptMemory, AttentionMakesNoMatrixOfScores) {
  constexpr std::int64_t kLong = 2048;
  const Tensor qkv = torch::randn({1, kLong, 3 * 32}).requires_grad_(true);
  const Tensor gradient = torch::randn({1, kLong, 32});
  AttentionOptions options;
  options.causal = true;
  EXPECT_LT(peak_of([&] { attention(qkv, 2, options).backward(gradient); }), kLong * kLong * 4);
}

TEST(GptMemory, CrossEntropyDoesNotMakeAllLogits) {
  constexpr std::int64_t kRows = 2048, kClasses = 4000;
  const Tensor hidden = torch::randn({kRows, 16}).requires_grad_(true),
               weight = torch::randn({kClasses, 16}).requires_grad_(true);
  const Tensor targets = torch::randint(0, kClasses, {kRows});
  EXPECT_LT(peak_of([&] { linear_cross_entropy(hidden, weight, targets).backward(); }),
            kRows * kClasses * 4 / 3);
}

TEST(GptMemory, LeavesNothingBehind) {
  const Chain chain = one_block();
  const MicroBatch micro{{torch::randint(0, 100, {kGptSamples, kGptLength})},
                         {torch::randint(0, 100, {kGptSamples, kGptLength})},
                         kGptSamples,
                         kGptTokens};
  const auto update = [&] {
    Tensor x = micro.inputs[0];
    for (std::size_t i = 0; i < chain.size(); ++i) x = chain.stage(i).forward({x}, micro, 0).at(0);
    x.backward();
    for (const Tensor& p : chain.parameters()) p.mutable_grad() = Tensor();
  };
  update();
  const std::int64_t before = MemoryMeter::instance().live_bytes();
  update();
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), before);
}

TEST(GptMemory, WritesGradientsDirectlyWhereAllowed) {
  const Chain chain = one_block();
  const MicroBatch micro{{torch::randint(0, 100, {kGptSamples, kGptLength})},
                         {torch::randint(0, 100, {kGptSamples, kGptLength})},
                         kGptSamples,
                         kGptTokens};
  const auto run = [&](bool direct) {
    for (const Tensor& p : chain.parameters()) p.mutable_grad() = Tensor();
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      Tensor x = micro.inputs[0];
      for (std::size_t i = 0; i < chain.size(); ++i)
        x = chain.stage(i).forward({x}, micro, 0).at(0);
      if (direct) {
        const DirectGradientScope scope(
            [](const Tensor& parameter) { return torch::full_like(parameter, std::nan("")); });
        x.backward();
      } else {
        x.backward();
      }
    }
    std::vector<Tensor> gradients;
    for (const Tensor& p : chain.parameters()) gradients.push_back(p.grad());
    return gradients;
  };
  const std::vector<Tensor> usual = run(false), direct = run(true);
  const auto names = chain.named_parameters();
  for (std::size_t i = 0; i < usual.size(); ++i)
    EXPECT_LE(reference::difference(direct[i], usual[i]), 1e-6) << names[i].first;
}

}  // namespace
}  // namespace headroom
