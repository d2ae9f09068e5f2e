// Every function against its reference: values and gradients over random shapes and in the corners,
// in float and in double; finite differences; the same bits again. What float cannot give to
// anybody is measured against what the reference gives in float.

#include <headroom/ops/transformer.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/patch_embedding.h"
#include "ops/rows_at.h"

#include <headroom/core/error.h>

#include "ops/block_inputs.h"
#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace headroom {
namespace {

using reference::expect_equal;
using reference::expect_finite_differences;
using reference::tolerance_of;
using testing::attention_of;
using testing::block_inputs;
using testing::mlp_of;
using testing::run_block;
using torch::Tensor;
using Inputs = std::vector<Tensor>;

template <class Value>
Value pick(const std::vector<Value>& values, std::mt19937& random) {
  return values[random() % values.size()];
}

// ---- Attention

struct AttentionCase {
  std::int64_t num_samples, length, num_heads, head_size;
  AttentionOptions options;
  Tensor qkv;
};

AttentionCase random_attention(std::mt19937& random, const std::vector<std::int64_t>& lengths,
                               const std::vector<std::int64_t>& head_sizes) {
  AttentionCase c;
  c.num_samples = static_cast<std::int64_t>(1 + random() % 3);
  c.length = pick(lengths, random);
  c.num_heads = static_cast<std::int64_t>(1 + random() % 3);
  c.head_size = pick(head_sizes, random);
  c.options.causal = random() % 2 == 0;
  torch::manual_seed(random());
  switch (random() % 4) {
    case 0:
      c.options.key_mask = torch::rand({c.num_samples, c.length}) < 0.6;
      break;
    case 1:
      c.options.key_mask = torch::zeros({c.num_samples, c.length}, torch::kBool);
      break;
    case 2:
      c.options.key_mask = torch::arange(c.length).unsqueeze(0) <
                           torch::randint(0, c.length + 1, {c.num_samples, 1});
      break;
    default:
      break;
  }
  c.qkv = torch::randn({c.num_samples, c.length, 3 * c.num_heads * c.head_size});
  return c;
}

TEST(Exactness, AttentionOverRandomShapesAndMasks) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const AttentionCase c =
        random_attention(random, {1, 2, 3, 17, 31, 47, 48, 49, 97, 255, 256, 257, 300},
                         {1, 2, 5, 8, 16, 17, 33, 64, 80});
    SCOPED_TRACE(::testing::Message() << "case " << i << ": T " << c.length << " H " << c.num_heads
                                      << " D " << c.head_size << " causal " << c.options.causal
                                      << " mask " << c.options.key_mask.defined());
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      expect_equal([&](const Inputs& in) { return attention(in[0], c.num_heads, c.options); },
                   [&](const Inputs& in) {
                     return reference::attention(in[0], c.num_heads, c.options.causal,
                                                 c.options.key_mask);
                   },
                   {c.qkv}, tolerance_of(type), type);
    }
  }
}

// 0 or 1 / (1 - p) for every weight (1, H, T, T) of the call that follows manual_seed(seed):
// uniform weights over one-hot values show it.
Tensor attention_keep(std::int64_t length, std::int64_t num_heads, double p, std::uint64_t seed) {
  const Tensor values = torch::eye(length).repeat({1, num_heads}).unsqueeze(0);
  AttentionOptions options;
  options.dropout_p = p;
  torch::manual_seed(seed);
  const Tensor y =
      attention(torch::cat({torch::zeros({1, length, 2 * num_heads * length}), values}, 2),
                num_heads, options);
  return (y * static_cast<double>(length)).view({1, length, num_heads, length}).transpose(1, 2);
}

TEST(Exactness, AttentionWithDropoutMaskAndSeveralHeads) {
  for (const std::int64_t length : {1, 33, 70}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "T " << length << " causal " << causal);
      AttentionOptions options;
      options.causal = causal;
      options.dropout_p = 0.3;
      options.key_mask = torch::ones({1, length}, torch::kBool);
      if (length > 1) options.key_mask[0][length / 2] = false;
      const Tensor keep = attention_keep(length, 3, 0.3, 9);
      torch::manual_seed(4);
      expect_equal(
          [&](const Inputs& in) {
            torch::manual_seed(9);
            return attention(in[0], 3, options);
          },
          [&](const Inputs& in) {
            return reference::attention(in[0], 3, causal, options.key_mask,
                                        keep.to(torch::kDouble));
          },
          {torch::randn({1, length, 3 * 3 * 12})}, 1e-5);
    }
  }
}

TEST(Exactness, AttentionWithDropoutInDouble) {
  AttentionOptions options;
  options.causal = true;
  options.dropout_p = 0.4;
  torch::manual_seed(9);
  const Tensor keep = torch::dropout(torch::ones({2, 2, 9, 9}, torch::kDouble), 0.4, true);
  torch::manual_seed(3);
  expect_equal(
      [&](const Inputs& in) {
        torch::manual_seed(9);
        return attention(in[0], 2, options);
      },
      [&](const Inputs& in) { return reference::attention(in[0], 2, true, {}, keep); },
      {torch::randn({2, 9, 3 * 2 * 5})}, 1e-10, torch::kDouble);
}

// A score of size s is rounded by 6e-8 s in float, and its weight by as much relatively: with
// scores of 10^3 and 10^4 no float computation reaches 1e-5. Ours stays with the reference in
// float, within a factor of two: errors are summed over cases, but a few rows where two keys tie
// make most of them, and which rows those are depends on the instructions that a CPU has.
TEST(Exactness, AttentionWithHugeScoresIsAsExactAsFloatAllows) {
  for (const double scale : {10.0, 30.0, 100.0}) {
    reference::FloatErrors errors;
    for (const std::int64_t head_size : {16, 24, 64}) {
      for (const bool causal : {false, true}) {
        AttentionOptions options;
        options.causal = causal;
        for (int seed = 0; seed < 6; ++seed) {
          torch::manual_seed(seed);
          errors.add([&](const Inputs& in) { return attention(in[0], 1, options); },
                     [&](const Inputs& in) { return reference::attention(in[0], 1, causal); },
                     {torch::randn({1, 270, 3 * head_size}) * scale});
        }
      }
    }
    for (std::size_t i = 0; i < errors.ours.size(); ++i) {
      EXPECT_LE(errors.ours[i], 2.0 * errors.plain[i]) << "inputs x " << scale << ", result " << i;
    }
  }
}

// Where one key has all the weight, the gradient of the scores is 0, not the difference of two
// roundings.
TEST(Exactness, AttentionHasNoGradientWhereOneKeyHasAllTheWeight) {
  for (const std::int64_t head_size : {5, 16, 40, 64}) {
    torch::manual_seed(head_size);
    const std::int64_t length = 60;
    const Tensor q = torch::zeros({1, length, head_size}), k = q.clone();
    q.select(2, 0).fill_(1000.0);
    k[0][7][0] = 1000.0;  // every query sees key 7 alone
    Tensor qkv =
        torch::cat({q, k, torch::randn({1, length, head_size}) * 50}, 2).requires_grad_(true);
    (attention(qkv, 1) * torch::randn({1, length, head_size})).sum().backward();
    EXPECT_EQ(qkv.grad().slice(2, 0, 2 * head_size).abs().max().item<float>(), 0.0f) << head_size;
  }
}

TEST(Exactness, AttentionByFiniteDifferences) {
  std::mt19937 random(2);
  for (int i = 0; i < 8; ++i) {
    const AttentionCase c = random_attention(random, {1, 2, 3, 5}, {1, 2, 3});
    SCOPED_TRACE(::testing::Message() << "case " << i << ": T " << c.length << " H " << c.num_heads
                                      << " D " << c.head_size);
    expect_finite_differences(
        [&](const Inputs& in) { return attention(in[0], c.num_heads, c.options); }, {c.qkv});
  }
}

// ---- Layer norm

TEST(Exactness, LayerNormOverWidths) {
  for (const std::int64_t width : {1, 2, 3, 5, 15, 16, 17, 31, 64, 100, 769}) {
    for (const int affine : {0, 1, 2}) {  // none, weight alone, both
      for (const auto type : {torch::kFloat, torch::kDouble}) {
        SCOPED_TRACE(::testing::Message()
                     << "width " << width << " affine " << affine << " " << type);
        torch::manual_seed(width);
        expect_equal(
            [](const Inputs& in) { return layer_norm(in[0], in[1], in[2]); },
            [](const Inputs& in) { return reference::layer_norm(in[0], in[1], in[2], 1e-5); },
            {torch::randn({3, 37, width}) * 3 + 2, affine > 0 ? torch::randn({width}) : Tensor(),
             affine > 1 ? torch::randn({width}) : Tensor()},
            tolerance_of(type), type);
      }
    }
  }
}

TEST(Exactness, LayerNormOfConstantRows) {
  const Tensor x = torch::tensor(
      {{3.0, 3.0, 3.0, 3.0, 3.0}, {0.0, 0.0, 0.0, 0.0, 0.0}, {-7.5, -7.5, -7.5, -7.5, -7.5}});
  expect_equal([](const Inputs& in) { return layer_norm(in[0], in[1], in[2]); },
               [](const Inputs& in) { return reference::layer_norm(in[0], in[1], in[2], 1e-5); },
               {x, torch::randn({5}), torch::randn({5})}, 1e-5);
}

// A mean far above the deviation: what subtracting it leaves has lost digits for anybody.
TEST(Exactness, LayerNormFarFromZeroIsAsExactAsFloatAllows) {
  for (const double offset : {1e2, 1e3, 1e4}) {
    reference::FloatErrors errors;
    constexpr int kSeeds = 4;
    for (int seed = 0; seed < kSeeds; ++seed) {
      torch::manual_seed(seed);
      errors.add([](const Inputs& in) { return layer_norm(in[0], in[1], in[2]); },
                 [](const Inputs& in) { return reference::layer_norm(in[0], in[1], in[2], 1e-5); },
                 {torch::randn({50, 96}) + offset, torch::randn({96}), torch::randn({96})});
    }
    for (std::size_t i = 0; i < errors.ours.size(); ++i) {
      EXPECT_LE(errors.ours[i], std::max(kSeeds * 1e-5, 2 * errors.plain[i]))
          << offset << ", result " << i << ", reference " << errors.plain[i];
    }
  }
}

TEST(Exactness, LayerNormByFiniteDifferences) {
  torch::manual_seed(1);
  expect_finite_differences([](const Inputs& in) { return layer_norm(in[0], in[1], in[2]); },
                            {torch::randn({4, 5}), torch::randn({5}), torch::randn({5})});
}

// ---- Linear + cross-entropy

struct EntropyCase {
  std::int64_t num_rows, width, num_classes;
  Tensor targets;
  CrossEntropyOptions options;
};

EntropyCase random_entropy(std::mt19937& random, bool small) {
  EntropyCase c;
  c.num_rows = pick<std::int64_t>(small ? std::vector<std::int64_t>{1, 2, 5}
                                        : std::vector<std::int64_t>{1, 2, 7, 31, 100, 513, 1030},
                                  random);
  c.width = pick<std::int64_t>(
      small ? std::vector<std::int64_t>{1, 3} : std::vector<std::int64_t>{1, 2, 5, 16, 33, 64},
      random);
  c.num_classes = pick<std::int64_t>(small ? std::vector<std::int64_t>{1, 2, 6}
                                           : std::vector<std::int64_t>{1, 2, 3, 15, 17, 50, 257},
                                     random);
  torch::manual_seed(random());
  c.targets = torch::randint(0, c.num_classes, {c.num_rows});
  const double ignored = pick<double>({0.0, 0.3, 0.95}, random);
  c.targets.masked_fill_(torch::rand({c.num_rows}) < ignored, c.options.ignore_index);
  c.targets[0] = c.num_classes - 1;
  if (random() % 2 == 0) c.options.item_weights = torch::rand({c.num_rows}) + 0.1;
  if (random() % 2 == 0) c.options.reduction = CrossEntropyOptions::Reduction::kSum;
  return c;
}

TEST(Exactness, LinearCrossEntropyOverRandomShapes) {
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    const EntropyCase c = random_entropy(random, false);
    SCOPED_TRACE(::testing::Message() << "case " << i << ": " << c.num_rows << " rows of "
                                      << c.width << ", " << c.num_classes << " classes");
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      expect_equal(
          [&](const Inputs& in) {
            return linear_cross_entropy(in[0], in[1], c.targets, c.options);
          },
          [&](const Inputs& in) {
            return reference::linear_cross_entropy(in[0], in[1], c.targets, c.options);
          },
          {torch::randn({c.num_rows, c.width}), torch::randn({c.num_classes, c.width})},
          tolerance_of(type), type);
    }
  }
}

TEST(Exactness, LinearCrossEntropyWithABias) {
  const auto with = [](CrossEntropyOptions options, const Tensor& bias) {
    options.bias = bias;
    return options;
  };
  std::mt19937 random(7);
  for (int i = 0; i < 30; ++i) {
    const EntropyCase c = random_entropy(random, i >= 25);
    SCOPED_TRACE(::testing::Message() << "case " << i << ": " << c.num_rows << " rows of "
                                      << c.width << ", " << c.num_classes << " classes");
    const reference::Function ours = [&](const Inputs& in) {
      return linear_cross_entropy(in[0], in[1], c.targets, with(c.options, in[2]));
    };
    const Inputs inputs{torch::randn({c.num_rows, c.width}), torch::randn({c.num_classes, c.width}),
                        torch::randn({c.num_classes}) * 2};
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      expect_equal(
          ours,
          [&](const Inputs& in) {
            return reference::linear_cross_entropy(in[0], in[1], c.targets, with(c.options, in[2]));
          },
          inputs, tolerance_of(type), type);
    }
    if (i >= 25) expect_finite_differences(ours, inputs);
  }
}

TEST(Exactness, LinearCrossEntropyWithHugeLogitsIsAsExactAsFloatAllows) {
  for (const double scale : {10.0, 100.0, 1000.0}) {
    reference::FloatErrors errors;
    constexpr int kSeeds = 6;
    for (int seed = 0; seed < kSeeds; ++seed) {
      torch::manual_seed(seed);
      const Tensor targets = torch::randint(0, 40, {200});
      errors.add([&](const Inputs& in) { return linear_cross_entropy(in[0], in[1], targets); },
                 [&](const Inputs& in) {
                   return reference::linear_cross_entropy(in[0], in[1], targets, {});
                 },
                 {torch::randn({200, 24}) * scale, torch::randn({40, 24})});
    }
    for (std::size_t i = 0; i < errors.ours.size(); ++i) {
      EXPECT_LE(errors.ours[i], std::max(kSeeds * 1e-5, 2 * errors.plain[i]))
          << scale << ", result " << i << ", reference " << errors.plain[i];
    }
  }
}

// When the target has nearly all the probability, loss and gradient are what the others leave: 1 +
// 1e-6 - 1 would keep one digit of it.
TEST(Exactness, LinearCrossEntropyNearZeroKeepsItsDigits) {
  for (const double margin : {9.0, 14.0, 30.0}) {
    const Tensor weight = torch::tensor({{0.0}, {1.0}, {0.0}, {-1.0}, {0.01}}).to(torch::kFloat);
    const Tensor targets = torch::ones({3}, torch::kLong);
    expect_equal([&](const Inputs& in) { return linear_cross_entropy(in[0], in[1], targets); },
                 [&](const Inputs& in) {
                   return reference::linear_cross_entropy(in[0], in[1], targets, {});
                 },
                 {torch::full({3, 1}, margin), weight}, 1e-5);
  }
}

TEST(Exactness, LinearCrossEntropyByFiniteDifferences) {
  std::mt19937 random(4);
  for (int i = 0; i < 8; ++i) {
    const EntropyCase c = random_entropy(random, true);
    expect_finite_differences(
        [&](const Inputs& in) { return linear_cross_entropy(in[0], in[1], c.targets, c.options); },
        {torch::randn({c.num_rows, c.width}), torch::randn({c.num_classes, c.width})});
  }
}

// ---- MLP, block, the rest

Tensor run_post_norm(const Inputs& in, const BlockOptions& options) {
  return post_norm_block(in[0], attention_of(in), mlp_of(in), options);
}

TEST(Exactness, MlpOverRandomShapes) {
  std::mt19937 random(5);
  for (int i = 0; i < 20; ++i) {
    const auto rows = pick<std::int64_t>({1, 3, 40, 1100}, random),
               width = pick<std::int64_t>({1, 6, 17, 32}, random);
    const auto hidden = pick<std::int64_t>({1, 5, 21, 64}, random);
    BlockOptions options;
    options.gelu = pick<GeluKind>({GeluKind::kExact, GeluKind::kTanh, GeluKind::kQuick}, random);
    torch::manual_seed(random());
    SCOPED_TRACE(::testing::Message()
                 << "case " << i << ": " << rows << " rows, " << width << " x " << hidden);
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      expect_equal(
          [&](const Inputs& in) {
            return mlp(in[0], {{}, {}, in[1], in[2], in[3], in[4]}, options);
          },
          [&](const Inputs& in) {
            return reference::linear(
                reference::gelu(reference::linear(in[0], in[1], in[2]), options.gelu), in[3],
                in[4]);
          },
          {torch::randn({rows, width}), torch::randn({hidden, width}), torch::randn({hidden}),
           torch::randn({width, hidden}), random() % 2 == 0 ? torch::randn({width}) : Tensor()},
          tolerance_of(type), type);
    }
  }
}

TEST(Exactness, BlockWithPaddingAndResidualDropout) {
  for (const std::int64_t length : {1, 9, 350}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "T " << length << " causal " << causal);
      BlockOptions options;
      options.num_heads = 2;
      options.attention.causal = causal;
      options.attention.key_mask =
          torch::arange(length).unsqueeze(0) <
          torch::tensor({length, length / 2, std::int64_t{0}}).unsqueeze(1);
      options.residual_dropout_p = 0.25;
      torch::manual_seed(8);
      const Tensor ones = torch::ones({3 * length, 12});
      const std::array<Tensor, 2> keep{dropout(ones, 0.25), dropout(ones, 0.25)};
      torch::manual_seed(length);
      expect_equal(
          [&](const Inputs& in) {
            torch::manual_seed(8);
            return run_block(in, options);
          },
          [&](const Inputs& in) {
            return reference::block(in[0], attention_of(in), mlp_of(in), options, keep);
          },
          block_inputs(3, length, 12, 20, true), 1e-5);
    }
  }
}

TEST(Exactness, BlockByFiniteDifferences) {
  for (const GeluKind gelu : {GeluKind::kExact, GeluKind::kTanh, GeluKind::kQuick}) {
    BlockOptions options;
    options.num_heads = 2;
    options.attention.causal = true;
    options.gelu = gelu;
    torch::manual_seed(6);
    expect_finite_differences([&](const Inputs& in) { return run_block(in, options); },
                              block_inputs(1, 3, 4, 6, true));
  }
}

TEST(Exactness, PostNormBlockOverShapesPaddingAndDropout) {
  for (const std::int64_t length : {1, 9, 350}) {
    for (const double p : {0.0, 0.25}) {
      for (const bool biases : {true, false}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << length << " dropout " << p << " biases " << biases);
        BlockOptions options;
        options.num_heads = 2;
        options.gelu = GeluKind::kExact;
        options.norm_eps = 1e-12;
        options.attention.key_mask =
            torch::arange(length).unsqueeze(0) <
            torch::tensor({length, length / 2, std::int64_t{0}}).unsqueeze(1);
        options.residual_dropout_p = p;
        torch::manual_seed(8);
        const Tensor ones = torch::ones({3 * length, 12});
        const std::array<Tensor, 2> keep{dropout(ones, p), dropout(ones, p)};
        torch::manual_seed(length);
        expect_equal(
            [&](const Inputs& in) {
              torch::manual_seed(8);
              return run_post_norm(in, options);
            },
            [&](const Inputs& in) {
              return reference::post_norm_block(in[0], attention_of(in), mlp_of(in), options, keep);
            },
            block_inputs(3, length, 12, 20, biases), 1e-5);
      }
    }
  }
}

TEST(Exactness, PostNormBlockInDoubleAndByFiniteDifferences) {
  BlockOptions options;
  options.num_heads = 2;
  options.gelu = GeluKind::kExact;
  torch::manual_seed(6);
  expect_equal([&](const Inputs& in) { return run_post_norm(in, options); },
               [&](const Inputs& in) {
                 return reference::post_norm_block(in[0], attention_of(in), mlp_of(in), options);
               },
               block_inputs(2, 7, 12, 20, true), 1e-10, torch::kDouble);
  expect_finite_differences([&](const Inputs& in) { return run_post_norm(in, options); },
                            block_inputs(1, 3, 4, 6, true));
}

TEST(Exactness, RowsAtGathersAndScatters) {
  const Tensor positions = torch::tensor({{0, 4, 4}, {3, 1, 0}});  // one of them twice
  const auto reference = [&](const Inputs& in) {
    return in[0]
        .gather(1, positions.unsqueeze(2).expand({2, 3, in[0].size(2)}))
        .reshape({6, in[0].size(2)});
  };
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    torch::manual_seed(3);
    expect_equal([&](const Inputs& in) { return rows_at(in[0], positions); }, reference,
                 {torch::randn({2, 5, 7})}, 1e-6, type);
  }
  EXPECT_THROW(rows_at(torch::randn({2, 4, 7}), positions), DataError);
  EXPECT_THROW(rows_at(torch::randn({3, 5, 7}), positions), ConfigError);
}

// Images of 2 x 3 patches, a projection with or without a bias, a class token and positions.
Inputs patch_inputs(std::int64_t num_samples, std::int64_t channels, std::int64_t patch,
                    std::int64_t width, bool bias) {
  return {torch::randn({num_samples, channels, 2 * patch, 3 * patch}),
          torch::randn({width, channels * patch * patch}), bias ? torch::randn({width}) : Tensor(),
          torch::randn({1, 1, width}), torch::randn({1, 7, width})};
}

TEST(Exactness, PatchEmbeddingIsAConvolution) {
  const auto reference = [](const Inputs& in, const Tensor& images, std::int64_t patch) {
    const Tensor kernel = in[0].view({in[0].size(0), images.size(1), patch, patch});
    const Tensor patches = torch::conv2d(images.to(in[0].scalar_type()), kernel, in[1], patch)
                               .flatten(2)
                               .transpose(1, 2);
    return torch::cat({in[2].expand({images.size(0), 1, -1}), patches}, 1) + in[3];
  };
  for (const std::int64_t num_samples : {1, 5}) {
    for (const std::int64_t channels : {1, 3}) {
      for (const std::int64_t patch : {1, 4}) {
        SCOPED_TRACE(::testing::Message() << num_samples << " images, " << channels
                                          << " channels, patches of " << patch);
        torch::manual_seed(patch);
        Inputs weights = patch_inputs(num_samples, channels, patch, 21, channels == 3);
        const Tensor images = weights[0];
        weights.erase(weights.begin());
        for (const auto type : {torch::kFloat, torch::kDouble}) {
          expect_equal(
              [&](const Inputs& in) {
                return patch_embedding(images.to(type), patch, {in[0], in[1], in[2], in[3]});
              },
              [&](const Inputs& in) { return reference(in, images, patch); }, weights,
              tolerance_of(type), type);
        }
      }
    }
  }
}

TEST(Exactness, PatchEmbeddingByFiniteDifferencesInTheImagesToo) {
  torch::manual_seed(9);
  expect_finite_differences(
      [](const Inputs& in) {
        return patch_embedding(in[0], 2, {in[1], in[2], in[3], in[4]});
      },
      patch_inputs(2, 1, 2, 3, true));
}

TEST(Exactness, LinearAndEmbeddingAndDropoutInBothTypes) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    torch::manual_seed(7);
    expect_equal([](const Inputs& in) { return linear(in[0], in[1], in[2]); },
                 [](const Inputs& in) { return reference::linear(in[0], in[1], in[2]); },
                 {torch::randn({37, 19}), torch::randn({23, 19}), torch::randn({23})},
                 tolerance_of(type), type);
    expect_equal([](const Inputs& in) { return linear(in[0], in[1], Tensor()); },
                 [](const Inputs& in) { return reference::linear(in[0], in[1], Tensor()); },
                 {torch::randn({37, 19}), torch::randn({23, 19})}, tolerance_of(type), type);
    const Tensor tokens = torch::randint(0, 9, {4, 7});
    expect_equal(
        [&](const Inputs& in) { return token_position_embedding(tokens, in[0], in[1]); },
        [&](const Inputs& in) { return torch::embedding(in[0], tokens) + in[1].slice(0, 0, 7); },
        {torch::randn({9, 35}), torch::randn({8, 35})}, tolerance_of(type), type);
    torch::manual_seed(2);
    const Tensor keep = dropout(torch::ones({31, 13}, type), 0.4).to(torch::kDouble);
    expect_equal(
        [](const Inputs& in) {
          torch::manual_seed(2);
          return dropout(in[0], 0.4);
        },
        [&](const Inputs& in) { return in[0] * keep; }, {torch::randn({31, 13})},
        type == torch::kDouble ? 1e-10 : 1e-6, type);
  }
}

TEST(Exactness, LinearAndEmbeddingAndDropoutByFiniteDifferences) {
  torch::manual_seed(8);
  expect_finite_differences([](const Inputs& in) { return linear(in[0], in[1], in[2]); },
                            {torch::randn({3, 4}), torch::randn({5, 4}), torch::randn({5})});
  const Tensor tokens = torch::randint(0, 4, {2, 3});
  expect_finite_differences(
      [&](const Inputs& in) { return token_position_embedding(tokens, in[0], in[1]); },
      {torch::randn({4, 3}), torch::randn({3, 3})});
  expect_finite_differences(
      [](const Inputs& in) {
        torch::manual_seed(2);
        return dropout(in[0], 0.4);
      },
      {torch::randn({4, 5})});
}

// ---- The same bits

struct Named {
  std::string name;
  reference::Function function;
  Inputs inputs;
  bool has_products;  // OpenBLAS may order its sums by the number of threads
};

std::vector<Named> everything() {
  torch::manual_seed(11);
  AttentionOptions attended;
  attended.causal = true;
  attended.dropout_p = 0.1;
  attended.key_mask = torch::rand({2, 130}) < 0.8;
  BlockOptions block;
  block.num_heads = 4;
  block.attention.causal = true;
  block.attention.dropout_p = block.residual_dropout_p = 0.1;
  const Tensor tokens = torch::randint(0, 50, {3, 200}), targets = torch::randint(0, 90, {600});
  const Tensor positions = torch::randint(0, 40, {9, 6});
  return {{"attention",
           [=](const Inputs& in) { return attention(in[0], 3, attended); },
           {torch::randn({2, 130, 3 * 3 * 24})},
           false},
          {"layer_norm",
           [](const Inputs& in) { return layer_norm(in[0], in[1], in[2]); },
           {torch::randn({1500, 70}), torch::randn({70}), torch::randn({70})},
           false},
          {"dropout",
           [](const Inputs& in) { return dropout(in[0], 0.2); },
           {torch::randn({900, 77})},
           false},
          {"embedding",
           [=](const Inputs& in) { return token_position_embedding(tokens, in[0], in[1]); },
           {torch::randn({50, 96}), torch::randn({200, 96})},
           false},
          {"linear_cross_entropy",
           [=](const Inputs& in) { return linear_cross_entropy(in[0], in[1], targets); },
           {torch::randn({600, 48}), torch::randn({90, 48})},
           true},
          {"patch_embedding",
           [images = torch::randn({6, 2, 8, 12})](const Inputs& in) {
             return patch_embedding(images, 4, {in[0], in[1], in[2], in[3]});
           },
           {torch::randn({40, 32}), torch::randn({40}), torch::randn({1, 1, 40}),
            torch::randn({1, 7, 40})},
           true},
          {"mlp",
           [=](const Inputs& in) {
             return mlp(in[0], {{}, {}, in[1], in[2], in[3], in[4]}, block);
           },
           {torch::randn({700, 32}), torch::randn({64, 32}), torch::randn({64}),
            torch::randn({32, 64}), torch::randn({32})},
           true},
          {"rows_at",
           [=](const Inputs& in) { return rows_at(in[0], positions); },
           {torch::randn({9, 40, 33})},
           false},
          {"linear_cross_entropy with a bias",
           [=](const Inputs& in) {
             CrossEntropyOptions options;
             options.bias = in[2];
             return linear_cross_entropy(in[0], in[1], targets, options);
           },
           {torch::randn({600, 48}), torch::randn({90, 48}), torch::randn({90})},
           true},
          {"post_norm_block", [=](const Inputs& in) { return run_post_norm(in, block); },
           block_inputs(3, 120, 32, 64, true), true},
          {"transformer_block", [=](const Inputs& in) { return run_block(in, block); },
           block_inputs(3, 120, 32, 64, true), true}};
}

TEST(Exactness, BitsAreTheSameAgainAndForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const Named& named : everything()) {
    std::vector<Inputs> results;
    for (const int threads : {1, 1, 2, 2, 3}) {
      at::set_num_threads(threads);
      torch::manual_seed(5);
      results.push_back(reference::run(named.function, named.inputs, torch::kFloat));
    }
    EXPECT_TRUE(reference::same_bits(results[0], results[1])) << named.name << " with one thread";
    EXPECT_TRUE(reference::same_bits(results[2], results[3])) << named.name << " with two threads";
    for (const std::size_t other : {2U, 4U}) {
      if (!named.has_products) {
        EXPECT_TRUE(reference::same_bits(results[0], results[other]))
            << named.name << " with one and more threads";
      } else {
        for (std::size_t i = 0; i < results[0].size(); ++i)
          EXPECT_LE(reference::difference(results[other][i], results[0][i]), 2e-6) << named.name;
      }
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace headroom
