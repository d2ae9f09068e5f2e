// The ops of this project computing in bf16: what has no product in it is the fp32 result, rounded
// once; every option of a block gives the same bits; the meta device counts the same bytes.
#include <headroom/execute/autocast.h>
#include <headroom/memory/meter.h>
#include <headroom/ops/transformer.h>
#include "memory/shape_meter.h"
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/rows_at.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

namespace headroom {
namespace {

using Op = std::function<at::Tensor(const at::Tensor& x)>;

struct ValueAndGradient {
  at::Tensor value, gradient;
};

// The op on bf16 numbers under autocast, or on the same numbers as floats.
ValueAndGradient run_in(at::ScalarType type, const Op& op, const at::Tensor& numbers) {
  const at::Tensor x = numbers.clone().to(type).requires_grad_();
  torch::manual_seed(5);
  ValueAndGradient result;
  {
    const Autocast autocast(at::kCPU, at::kBFloat16, type == at::kBFloat16);
    result.value = op(x);
  }
  torch::manual_seed(6);
  const at::Tensor incoming = torch::randn(result.value.sizes()).to(at::kBFloat16);
  result.gradient = torch::autograd::grad({result.value}, {x}, {incoming.to(type)})[0];
  EXPECT_EQ(result.value.scalar_type(), type);
  return result;
}

at::Tensor rounded_numbers(at::IntArrayRef sizes) {
  torch::manual_seed(4);
  return torch::randn(sizes).to(at::kBFloat16);
}

void expect_rounded(const at::Tensor& half, const at::Tensor& full, const char* what) {
  EXPECT_TRUE(torch::equal(half, full.to(at::kBFloat16))) << what;
}

TEST(OpsInHalf, PassesAreThoseInFloatRoundedOnce) {
  const at::Tensor weight = torch::randn({37}), bias = torch::randn({37});
  const at::Tensor positions = torch::tensor({{0, 5, 5}, {6, 1, 2}});
  const std::pair<const char*, Op> ops[] = {
      {"layer norm", [&](const at::Tensor& x) { return layer_norm(x, weight, bias); }},
      {"RMS norm", [&](const at::Tensor& x) { return rms_norm(x, weight, 1e-6); }},
      {"dropout", [&](const at::Tensor& x) { return dropout(x, 0.3); }}};
  const at::Tensor numbers = rounded_numbers({2, 7, 37});
  for (const auto& [name, op] : ops) {
    const ValueAndGradient half = run_in(at::kBFloat16, op, numbers),
                           full = run_in(at::kFloat, op, numbers);
    expect_rounded(half.value, full.value, name);
    expect_rounded(half.gradient, full.gradient, name);
  }
  const Op rows = [&](const at::Tensor& x) { return rows_at(x, positions); };
  expect_rounded(run_in(at::kBFloat16, rows, numbers).value,
                 run_in(at::kFloat, rows, numbers).value, "rows");
}

TEST(OpsInHalf, AttentionIsThatInFloatRoundedOnce) {
  for (const double p : {0.0, 0.2}) {
    const Op op = [&](const at::Tensor& x) {
      AttentionOptions options;
      options.causal = true;
      options.dropout_p = p;
      options.rotary = RotaryOptions();
      return attention(x, 3, options);
    };
    const at::Tensor numbers = rounded_numbers({2, 77, 3 * 3 * 20});
    const ValueAndGradient half = run_in(at::kBFloat16, op, numbers),
                           full = run_in(at::kFloat, op, numbers);
    expect_rounded(half.value, full.value, "attention");
    // Backward reads the rounded output, which moves each gradient by a rounding of its size.
    const double error = (half.gradient.to(at::kFloat) - full.gradient).norm().item<double>();
    EXPECT_LE(error, full.gradient.norm().item<double>() / 128.0);
  }
}

TEST(OpsInHalf, AnEmbeddingIsRoundedAndItsGradientIsSummedInFloat) {
  torch::manual_seed(3);
  const at::Tensor words = torch::randn({11, 24}).requires_grad_(),
                   positions = torch::randn({9, 24}).requires_grad_();
  const at::Tensor tokens = torch::randint(11, {4, 9});
  at::Tensor y;
  {
    const Autocast autocast(at::kCPU, at::kBFloat16);
    y = token_position_embedding(tokens, words, positions);
  }
  expect_rounded(y, words.index({tokens}) + positions, "embedding");
  y.backward(torch::ones_like(y));
  EXPECT_TRUE(torch::equal(positions.grad(), torch::full({9, 24}, 4.0)));
  EXPECT_EQ(words.grad().sum().item<double>(), 4.0 * 9 * 24);
}

// Logits are summed and compared in fp32, so that the loss errs by the rounding of its inputs
// alone; they are the same in both runs here.
TEST(OpsInHalf, CrossEntropyIsThatOfRoundedInputs) {
  torch::manual_seed(2);
  const at::Tensor hidden = torch::randn({70, 48}).to(at::kBFloat16),
                   words = torch::randn({301, 48}).to(at::kBFloat16).to(at::kFloat);
  const at::Tensor bias = torch::randn({301}).requires_grad_();
  at::Tensor targets = torch::randint(301, {70});
  targets[3] = -100;
  const auto run = [&](at::ScalarType type) {
    const at::Tensor x = hidden.clone().to(type).requires_grad_(),
                     w = words.clone().requires_grad_();
    bias.mutable_grad() = at::Tensor();
    CrossEntropyOptions options;
    options.bias = bias;
    at::Tensor loss;
    {
      const Autocast autocast(at::kCPU, at::kBFloat16, type == at::kBFloat16);
      loss = linear_cross_entropy(x, w, targets, options);
    }
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    loss.backward();
    return std::vector<at::Tensor>{loss.detach(), x.grad().to(at::kFloat), w.grad(),
                                   bias.grad().clone()};
  };
  const std::vector<at::Tensor> half = run(at::kBFloat16), full = run(at::kFloat);
  EXPECT_NEAR(half[0].item<double>(), full[0].item<double>(), 1e-5 * full[0].item<double>());
  for (std::size_t i = 1; i < full.size(); ++i) {
    EXPECT_LE((half[i] - full[i]).norm().item<double>(), full[i].norm().item<double>() / 128.0)
        << i;
  }
}

struct HalfBlock {
  explicit HalfBlock(bool is_gated, const at::TensorOptions& device = {}) {
    const auto weight = [&](at::IntArrayRef sizes) {
      const at::Tensor t = device.device().is_meta()
                               ? torch::empty(sizes, device)
                               : torch::randn(sizes) / std::sqrt(static_cast<double>(sizes.back()));
      return t.requires_grad_();
    };
    attention = {weight({40}),  weight({40}),     weight({120, 40}),
                 weight({120}), weight({40, 40}), weight({40})};
    mlp = {weight({40}),
           weight({40}),
           weight({is_gated ? 192 : 96, 40}),
           weight({is_gated ? 192 : 96}),
           weight({40, 96}),
           weight({40})};
    options.num_heads = 4;
    options.attention.causal = true;
    options.gated = is_gated;
  }
  AttentionWeights attention;
  MlpWeights mlp;
  BlockOptions options;
};

TEST(OpsInHalf, ABlockGivesTheSameBitsWhateverItKeeps) {
  for (const auto block_form : {transformer_block, post_norm_block}) {
    for (const bool is_gated : {false, true}) {
      torch::manual_seed(9);
      HalfBlock block(is_gated);
      block.options.attention.dropout_p = block.options.residual_dropout_p = 0.1;
      const at::Tensor numbers = rounded_numbers({3, 500, 40});
      const auto run = [&](BlockKeep keep) {
        block.options.keep = keep;
        return run_in(
            at::kBFloat16,
            [&](const at::Tensor& x) {
              return block_form(x, block.attention, block.mlp, block.options);
            },
            numbers);
      };
      const ValueAndGradient all = run(BlockKeep::kAll);
      for (const BlockKeep keep : {BlockKeep::kNoGelu, BlockKeep::kNoGeluNorms,
                                   BlockKeep::kNoGeluNormsQkv, BlockKeep::kAttention}) {
        const ValueAndGradient other = run(keep);
        EXPECT_TRUE(torch::equal(all.value, other.value));
        EXPECT_TRUE(torch::equal(all.gradient, other.gradient));
      }
    }
  }
}

TEST(OpsInHalf, TheMetaDeviceCountsTheSameBytes) {
  const auto run = [](const HalfBlock& block, const at::Tensor& x) {
    at::Tensor y;
    {
      const Autocast autocast(at::kCPU, at::kBFloat16);
      y = transformer_block(x, block.attention, block.mlp, block.options);
    }
    y.backward(torch::empty_like(y));
  };
  MemoryMeter& meter = MemoryMeter::instance();
  const HalfBlock real(false);
  const at::Tensor x = torch::randn({2, 100, 40}).to(at::kBFloat16).requires_grad_();
  meter.reset_peak();
  const std::int64_t before = meter.live_bytes();
  run(real, x);
  const std::int64_t measured = meter.peak_bytes() - before;

  ShapeMeter& shapes = ShapeMeter::instance();
  const auto meta = torch::TensorOptions().device(at::kMeta);
  const HalfBlock shadow(false, meta);
  const at::Tensor shape = torch::empty({2, 100, 40}, meta.dtype(at::kBFloat16)).requires_grad_();
  shapes.reset_peak();
  const std::int64_t shapes_before = shapes.live_bytes();
  run(shadow, shape);
  EXPECT_EQ(shapes.peak_bytes() - shapes_before, measured);
}

}  // namespace
}  // namespace headroom
