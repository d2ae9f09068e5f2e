#include <headroom/ops/transformer.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"

#include <headroom/core/error.h>

#include "ops/block_inputs.h"
#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using reference::difference;
using testing::attention_of;
using testing::mlp_of;
using testing::run_block;
using torch::Tensor;

std::vector<Tensor> random_inputs(std::int64_t B, std::int64_t T, std::int64_t C, std::int64_t F,
                                  bool biases = true) {
  torch::manual_seed(B * 100 + T + C);
  return testing::block_inputs(B, T, C, F, biases);
}

TEST(LayerNorm, EqualsItsTwin) {
  for (const std::int64_t width : {1, 5, 16, 31, 64, 100}) {
    for (const bool affine : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "width " << width << " affine " << affine);
      torch::manual_seed(width);
      const Tensor weight = affine ? torch::randn({width}) : Tensor(),
                   bias = affine ? torch::randn({width}) : Tensor();
      reference::expect_equal(
          [](const std::vector<Tensor>& in) { return layer_norm(in[0], in[1], in[2]); },
          [](const std::vector<Tensor>& in) {
            return reference::layer_norm(in[0], in[1], in[2], 1e-5);
          },
          {torch::randn({3, 37, width}) * 3 + 2, weight, bias}, 1e-5);
    }
  }
}

TEST(LayerNorm, TakesDouble) {
  reference::expect_equal(
      [](const std::vector<Tensor>& in) { return layer_norm(in[0], in[1], in[2]); },
      [](const std::vector<Tensor>& in) {
        return reference::layer_norm(in[0], in[1], in[2], 1e-5);
      },
      {torch::randn({4, 9}), torch::randn({9}), torch::randn({9})}, 1e-10, torch::kDouble);
}

TEST(Mlp, EqualsItsTwin) {
  for (const GeluKind kind : {GeluKind::kExact, GeluKind::kTanh, GeluKind::kQuick}) {
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      BlockOptions options;
      options.gelu = kind;
      torch::manual_seed(1);
      reference::expect_equal(
          [&](const std::vector<Tensor>& in) {
            return mlp(in[0], {{}, {}, in[1], in[2], in[3], in[4]}, options);
          },
          [&](const std::vector<Tensor>& in) {
            return reference::linear(reference::gelu(reference::linear(in[0], in[1], in[2]), kind),
                                     in[3], in[4]);
          },
          {torch::randn({5, 7, 6}), torch::randn({21, 6}), torch::randn({21}),
           torch::randn({6, 21}) / 4, torch::randn({6})},
          type == torch::kDouble ? 1e-10 : 1e-5, type);
    }
  }
}

TEST(Gelu, IsExactFarOut) {
  for (const GeluKind kind : {GeluKind::kExact, GeluKind::kTanh, GeluKind::kQuick}) {
    BlockOptions options;
    options.gelu = kind;
    const Tensor eye = torch::eye(1), x = torch::linspace(-30, 30, 1001).unsqueeze(1);
    reference::expect_equal(
        [&](const std::vector<Tensor>& in) {
          return mlp(in[0], {{}, {}, eye, {}, eye, {}}, options);
        },
        [&](const std::vector<Tensor>& in) { return reference::gelu(in[0], kind); }, {x}, 5e-6);
  }
}

TEST(TransformerBlock, EqualsItsTwin) {
  struct Shape {
    std::int64_t B, T, C, F, H;
  };
  for (const Shape& s : std::vector<Shape>{
           {1, 1, 4, 16, 1}, {2, 33, 12, 20, 3}, {2, 60, 64, 256, 4}, {3, 700, 16, 64, 2}}) {
    for (const bool biases : {true, false}) {
      for (const auto type : {torch::kFloat, torch::kDouble}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << s.T << " C " << s.C << " biases " << biases << " " << type);
        BlockOptions options;
        options.num_heads = s.H;
        options.attention.causal = biases;
        reference::expect_equal(
            [&](const std::vector<Tensor>& in) { return run_block(in, options); },
            [&](const std::vector<Tensor>& in) {
              return reference::block(in[0], attention_of(in), mlp_of(in), options);
            },
            random_inputs(s.B, s.T, s.C, s.F, biases), type == torch::kDouble ? 1e-10 : 1e-5, type);
      }
    }
  }
}

TEST(TransformerBlock, GivesTheSameBitsWhateverItKeeps) {
  for (const auto& [name, block_form] : {std::make_pair("pre-norm", transformer_block),
                                         std::make_pair("post-norm", post_norm_block)}) {
    for (const double p : {0.0, 0.2}) {
      SCOPED_TRACE(::testing::Message() << name << ", dropout " << p);
      BlockOptions options;
      options.num_heads = 4;
      options.attention.causal = true;
      options.attention.dropout_p = options.residual_dropout_p = p;
      options.attention.key_mask = torch::rand({3, 700}) < 0.9;
      const auto inputs = random_inputs(3, 700, 32, 128);
      const auto once = [&, block = block_form](const std::vector<Tensor>& in) {
        return block(in[0], attention_of(in), mlp_of(in), options);
      };
      const auto run = [&](BlockKeep keep) {
        options.keep = keep;
        torch::manual_seed(7);
        return reference::run(once, inputs, torch::kFloat);
      };
      const auto all = run(BlockKeep::kAll);
      for (const BlockKeep keep : {BlockKeep::kNoGelu, BlockKeep::kNoGeluNorms,
                                   BlockKeep::kNoGeluNormsQkv, BlockKeep::kAttention}) {
        EXPECT_TRUE(reference::same_bits(all, run(keep)))
            << block_keep_names()[static_cast<std::size_t>(keep)];
      }
      const torch::NoGradGuard no_grad;
      torch::manual_seed(7);
      EXPECT_TRUE(torch::equal(all[0], once(inputs))) << "without gradients";
    }
  }
}

TEST(TransformerBlock, RunsTwiceOnOneGraph) {
  BlockOptions options;
  options.num_heads = 2;
  auto inputs = random_inputs(1, 5, 8, 16);
  inputs[0].requires_grad_(true);
  const Tensor sum = run_block(inputs, options).sum();
  sum.backward({}, true);
  const Tensor once = inputs[0].grad().clone();
  sum.backward();
  EXPECT_LE(difference(inputs[0].grad(), once * 2), 1e-6);
}

TEST(TransformerBlock, GivesOnlyTheGradientsThatAreWanted) {
  BlockOptions options;
  options.num_heads = 2;
  auto inputs = random_inputs(2, 9, 8, 16);
  inputs[3].requires_grad_(true);   // qkv weight
  inputs[12].requires_grad_(true);  // last bias
  run_block(inputs, options).pow(2).sum().backward();
  const auto all = reference::run(
      [&](const std::vector<Tensor>& in) { return run_block(in, options).pow(2).sum(); }, inputs,
      torch::kFloat);
  EXPECT_TRUE(torch::equal(inputs[3].grad(), all[4]));
  EXPECT_TRUE(torch::equal(inputs[12].grad(), all[13]));
}

TEST(TransformerBlock, TakesNoSamples) {
  BlockOptions options;
  options.num_heads = 2;
  auto inputs = random_inputs(2, 9, 8, 16);
  inputs[0] = torch::zeros({0, 9, 8});
  const auto results =
      reference::run([&](const std::vector<Tensor>& in) { return run_block(in, options).sum(); },
                     inputs, torch::kFloat);
  for (std::size_t i = 2; i < results.size(); ++i)
    EXPECT_EQ(results[i].abs().max().item<float>(), 0.0f) << i;
}

TEST(TransformerBlock, RefusesASecondDerivative) {
  BlockOptions options;
  auto inputs = random_inputs(1, 3, 4, 8);
  inputs[0].requires_grad_(true);
  EXPECT_THROW(
      torch::autograd::grad({run_block(inputs, options).sum()}, {inputs[0]}, {}, true, true),
      c10::Error);
}

TEST(TransformerBlock, PassesThroughTheMetaDevice) {
  BlockOptions options;
  options.num_heads = 2;
  std::vector<Tensor> inputs;
  for (const Tensor& t : random_inputs(2, 9, 8, 16))
    inputs.push_back(torch::empty(t.sizes(), torch::kMeta).requires_grad_(true));
  const Tensor out = run_block(inputs, options);
  EXPECT_EQ(out.sizes(), inputs[0].sizes());
  out.backward(torch::empty_like(out));
  for (const Tensor& t : inputs) EXPECT_EQ(t.grad().sizes(), t.sizes());
}

// Every instruction set that this machine has gives the same answers.
TEST(TransformerBlock, EqualsItsTwinOnEveryTarget) {
  BlockOptions options;
  options.num_heads = 2;
  options.attention.causal = true;
  options.gelu = GeluKind::kExact;
  const auto inputs = random_inputs(2, 61, 42, 70);
  const auto expected = reference::run(
      [&](const std::vector<Tensor>& in) {
        return reference::block(in[0], attention_of(in), mlp_of(in), options);
      },
      inputs, torch::kDouble);
  std::int64_t disabled = 0;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::DisableTargets(disabled);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    const auto actual =
        reference::run([&](const std::vector<Tensor>& in) { return run_block(in, options); },
                       inputs, torch::kFloat);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(difference(actual[i], expected[i]), 1e-5) << i;
    disabled |= target;
  }
  hwy::DisableTargets(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Dropout, DropsAShareAndTheSameInBackward) {
  torch::manual_seed(1);
  Tensor x = torch::ones({50, 41}).requires_grad_(true);
  const Tensor y = dropout(x, 0.3);
  y.sum().backward();
  EXPECT_NEAR(y.eq(0).to(torch::kFloat).mean().item<double>(), 0.3, 0.03);
  EXPECT_NEAR(y.max().item<double>(), 1 / 0.7, 1e-6);
  EXPECT_TRUE(torch::equal(y, x.grad()));
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(y, dropout(x, 0.3)));
  EXPECT_FALSE(torch::equal(y, dropout(x, 0.3)));
  EXPECT_EQ(dropout(x, 1.0).abs().max().item<float>(), 0.0f);
  EXPECT_THROW(dropout(x, 1.5), ConfigError);
}

TEST(Dropout, IsTheSameOnEveryTarget) {
  std::vector<Tensor> results;
  std::int64_t disabled = 0;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::DisableTargets(disabled);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    torch::manual_seed(1);
    results.push_back(dropout(torch::ones({3, 77}), 0.5));
    EXPECT_TRUE(torch::equal(results.front(), results.back())) << hwy::TargetName(target);
    disabled |= target;
  }
  hwy::DisableTargets(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Embedding, EqualsItsTwin) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    torch::manual_seed(1);
    const Tensor tokens = torch::randint(0, 9, {4, 6});
    reference::expect_equal(
        [&](const std::vector<Tensor>& in) {
          return token_position_embedding(tokens, in[0], in[1]);
        },
        [&](const std::vector<Tensor>& in) {
          return torch::embedding(in[0], tokens) + in[1].slice(0, 0, 6);
        },
        {torch::randn({9, 35}), torch::randn({8, 35})}, 1e-6, type);
  }
}

TEST(Embedding, RefusesWhatDoesNotFit) {
  const Tensor weight = torch::randn({9, 4}), positions = torch::randn({3, 4});
  EXPECT_THROW(token_position_embedding(torch::tensor({{9}}), weight, positions), DataError);
  EXPECT_THROW(token_position_embedding(torch::zeros({1, 4}, torch::kLong), weight, positions),
               ConfigError);
}

}  // namespace
}  // namespace headroom
