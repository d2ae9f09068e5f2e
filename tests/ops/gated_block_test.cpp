// The parts of a Llama block: RMS norm, rotary positions, keys and values shared by heads of
// queries, and the gated MLP, each against its reference and at every option.

#include <headroom/ops/transformer.h>
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/rotary.h"

#include <headroom/core/error.h>

#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <torch/torch.h>

#include <random>

namespace headroom {
namespace {

using reference::difference;
using reference::expect_equal;
using reference::expect_finite_differences;
using reference::tolerance_of;
using torch::Tensor;
using Inputs = std::vector<Tensor>;

// ---- RMS norm

TEST(RmsNorm, EqualsItsReferenceOverWidths) {
  for (const std::int64_t width : {1, 2, 3, 5, 15, 16, 17, 31, 64, 100, 769}) {
    for (const bool weighted : {false, true}) {
      for (const auto type : {torch::kFloat, torch::kDouble}) {
        SCOPED_TRACE(::testing::Message() << "width " << width << " weight " << weighted << type);
        torch::manual_seed(width);
        expect_equal(
            [](const Inputs& in) { return rms_norm(in[0], in[1], 1e-6); },
            [](const Inputs& in) { return reference::rms_norm(in[0], in[1], 1e-6); },
            {torch::randn({3, 37, width}) * 3 + 2, weighted ? torch::randn({width}) : Tensor()},
            tolerance_of(type), type);
      }
    }
  }
}

TEST(RmsNorm, OfZerosIsZeroAndItsGradientFinite) {
  expect_equal([](const Inputs& in) { return rms_norm(in[0], in[1], 1e-5); },
               [](const Inputs& in) { return reference::rms_norm(in[0], in[1], 1e-5); },
               {torch::zeros({4, 9}), torch::randn({9})}, 1e-5);
  EXPECT_THROW(rms_norm(torch::zeros({4, 9}), torch::ones({8})), ConfigError);
}

TEST(RmsNorm, ByFiniteDifferences) {
  torch::manual_seed(1);
  expect_finite_differences([](const Inputs& in) { return rms_norm(in[0], in[1]); },
                            {torch::randn({4, 5}), torch::randn({5})});
}

// ---- Rotary positions

TEST(Rotary, HasTheFrequenciesOfThePaper) {
  RotaryOptions options;
  const std::vector<float> plain = ops::rotary_frequencies(options, 8);
  ASSERT_EQ(plain.size(), 4u);
  for (std::size_t j = 0; j < 4; ++j)
    EXPECT_FLOAT_EQ(plain[j], static_cast<float>(std::pow(10.0, -static_cast<double>(j)))) << j;
  // Wavelengths 2 pi 10^j: 6.3 stays, 63 goes over, 628 and 6283 become 4 times as long.
  options.scaling = RotaryScaling{4.0, 1.0, 4.0, 128};
  const std::vector<float> scaled = ops::rotary_frequencies(options, 8);
  const double share = (128 * 0.1 / (2 * M_PI) - 1.0) / 3.0;
  EXPECT_FLOAT_EQ(scaled[0], plain[0]);
  EXPECT_FLOAT_EQ(scaled[1], static_cast<float>(0.1 * (share + (1 - share) / 4)));
  EXPECT_FLOAT_EQ(scaled[2], plain[2] / 4);
  EXPECT_FLOAT_EQ(scaled[3], plain[3] / 4);
}

TEST(Rotary, TableOfLaterPositionsIsAPartOfTheWhole) {
  const Tensor like = torch::empty({0});
  const Tensor all = ops::rotary_table({}, 0, 300, 10, like),
               later = ops::rotary_table({}, 170, 130, 10, like);
  EXPECT_TRUE(torch::equal(all.slice(1, 170), later));
}

// A query and a key see how far apart they are, not where: shifting both by zeros before them
// changes nothing.
TEST(Rotary, ScoresDependOnTheDistanceAlone) {
  torch::manual_seed(3);
  AttentionOptions options;
  options.rotary = RotaryOptions();
  constexpr std::int64_t kShift = 9, kLength = 20;
  const Tensor text = torch::randn({1, kLength, 3 * 12});
  const Tensor shifted = torch::cat({torch::randn({1, kShift, 3 * 12}), text}, 1);
  AttentionOptions late = options;
  late.key_mask = (torch::arange(kShift + kLength) >= kShift).unsqueeze(0);
  EXPECT_LE(difference(attention(shifted, 1, late).slice(1, kShift), attention(text, 1, options)),
            1e-5);
  EXPECT_GT(difference(attention(text, 1), attention(text, 1, options)), 1e-2);
}

// ---- Attention with both

struct GroupedCase {
  std::int64_t num_samples, length, num_heads, num_kv_heads, head_size;
  AttentionOptions options;
  Tensor qkv;
};

GroupedCase random_grouped(std::mt19937& random, const std::vector<std::int64_t>& lengths,
                           const std::vector<std::int64_t>& head_sizes) {
  GroupedCase c;
  c.num_samples = static_cast<std::int64_t>(1 + random() % 3);
  c.length = lengths[random() % lengths.size()];
  c.num_kv_heads = static_cast<std::int64_t>(1 + random() % 2);
  c.num_heads = c.num_kv_heads * static_cast<std::int64_t>(1 + random() % 4);
  c.head_size = head_sizes[random() % head_sizes.size()];
  c.options.causal = random() % 4 != 0;
  c.options.num_kv_heads = c.num_kv_heads;
  if (random() % 4 != 0) c.options.rotary = RotaryOptions{random() % 2 == 0 ? 10000.0 : 5e5, {}};
  torch::manual_seed(random());
  if (random() % 3 == 0) c.options.key_mask = torch::rand({c.num_samples, c.length}) < 0.6;
  c.qkv = torch::randn({c.num_samples, c.length, (c.num_heads + 2 * c.num_kv_heads) * c.head_size});
  return c;
}

TEST(GroupedAttention, EqualsItsReferenceOverRandomShapes) {
  std::mt19937 random(1);
  for (int i = 0; i < 40; ++i) {
    const GroupedCase c = random_grouped(random, {1, 2, 17, 47, 48, 49, 97, 256, 257, 300},
                                         {2, 6, 8, 16, 34, 64, 80});
    SCOPED_TRACE(::testing::Message()
                 << "case " << i << ": T " << c.length << " H " << c.num_heads << " K "
                 << c.num_kv_heads << " D " << c.head_size << " causal " << c.options.causal
                 << " mask " << c.options.key_mask.defined() << " rotary "
                 << c.options.rotary.has_value());
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      expect_equal([&](const Inputs& in) { return attention(in[0], c.num_heads, c.options); },
                   [&](const Inputs& in) {
                     return reference::grouped_attention(in[0], c.num_heads, c.options);
                   },
                   {c.qkv}, tolerance_of(type), type);
    }
  }
}

TEST(GroupedAttention, ByFiniteDifferences) {
  std::mt19937 random(2);
  for (int i = 0; i < 6; ++i) {
    const GroupedCase c = random_grouped(random, {1, 2, 4}, {2, 4});
    SCOPED_TRACE(i);
    expect_finite_differences(
        [&](const Inputs& in) { return attention(in[0], c.num_heads, c.options); }, {c.qkv});
  }
}

// Repeating the keys and values for every head of queries is what sharing them means; dropout too.
TEST(GroupedAttention, IsAttentionWithRepeatedKeys) {
  torch::manual_seed(4);
  constexpr std::int64_t kHeads = 6, kGroups = 2, kSize = 10;
  AttentionOptions shared, repeated;
  shared.causal = repeated.causal = true;
  shared.dropout_p = repeated.dropout_p = 0.2;
  shared.num_kv_heads = kGroups;
  const Tensor qkv = torch::randn({2, 70, (kHeads + 2 * kGroups) * kSize});
  const auto repeat = [&](std::int64_t first) {
    return qkv.slice(2, first * kSize, (first + kGroups) * kSize)
        .view({2, 70, kGroups, kSize})
        .repeat_interleave(kHeads / kGroups, 2)
        .reshape({2, 70, kHeads * kSize});
  };
  const Tensor whole =
      torch::cat({qkv.slice(2, 0, kHeads * kSize), repeat(kHeads), repeat(kHeads + kGroups)}, 2);
  torch::manual_seed(5);
  const Tensor a = attention(qkv, kHeads, shared);
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(a, attention(whole, kHeads, repeated)));
}

TEST(GroupedAttention, RefusesSizesThatDoNotFit) {
  AttentionOptions options;
  options.num_kv_heads = 2;
  EXPECT_THROW(attention(torch::randn({1, 4, 7 * 8}), 3, options), ConfigError);  // 2 of 3
  EXPECT_THROW(attention(torch::randn({1, 4, 33}), 4, options), ConfigError);     // 33 by 8
  options.num_kv_heads = 0;
  EXPECT_THROW(attention(torch::randn({1, 4, 32}), 4, options), ConfigError);
  options.num_kv_heads = 4;
  options.rotary = RotaryOptions();
  EXPECT_THROW(attention(torch::randn({1, 4, 3 * 4 * 5}), 4, options), ConfigError);  // odd heads
}

// ---- The block

struct BlockSizes {
  std::int64_t B, T, C, F, H, K, D;
};

// x, then the weights of both halves, in the order of the structs; the norms have no bias.
Inputs gated_block_inputs(const BlockSizes& s, bool biases) {
  torch::manual_seed(s.B * 100 + s.T + s.C);
  const auto bias = [&](std::int64_t n) { return biases ? torch::randn({n}) * 0.1 : Tensor(); };
  const auto linear = [](std::int64_t out, std::int64_t in) {
    return torch::randn({out, in}) / std::sqrt(static_cast<double>(in));
  };
  const std::int64_t qkv = (s.H + 2 * s.K) * s.D;
  return {torch::randn({s.B, s.T, s.C}),
          torch::rand({s.C}) + 0.5,
          linear(qkv, s.C),
          bias(qkv),
          linear(s.C, s.H * s.D),
          bias(s.C),
          torch::rand({s.C}) + 0.5,
          linear(2 * s.F, s.C),
          bias(2 * s.F),
          linear(s.C, s.F),
          bias(s.C)};
}
AttentionWeights gated_attention_of(const Inputs& in) {
  return {in[1], {}, in[2], in[3], in[4], in[5]};
}
MlpWeights gated_mlp_of(const Inputs& in) { return {in[6], {}, in[7], in[8], in[9], in[10]}; }
Tensor run_gated_block(const Inputs& in, const BlockOptions& options) {
  return transformer_block(in[0], gated_attention_of(in), gated_mlp_of(in), options);
}
Tensor run_reference(const Inputs& in, const BlockOptions& options) {
  return reference::gated_block(in[0], gated_attention_of(in), gated_mlp_of(in), options);
}

BlockOptions block_options(const BlockSizes& s) {
  BlockOptions options;
  options.num_heads = s.H;
  options.attention.causal = true;
  options.attention.num_kv_heads = s.K;
  options.attention.rotary = RotaryOptions();
  options.norm = NormKind::kRms;
  options.norm_eps = 1e-6;
  options.gated = true;
  return options;
}

const std::vector<BlockSizes> kBlocks{{1, 1, 4, 6, 1, 1, 4},
                                      {2, 33, 12, 20, 3, 1, 4},
                                      {2, 60, 64, 170, 4, 2, 16},
                                      {2, 19, 24, 31, 4, 2, 10},  // heads wider than x together
                                      {3, 700, 16, 44, 2, 1, 8}};

TEST(GatedBlock, EqualsItsReferenceAtEveryOption) {
  for (const BlockSizes& s : kBlocks) {
    for (const bool biases : {true, false}) {
      BlockOptions options = block_options(s);
      const Inputs inputs = gated_block_inputs(s, biases);
      const Inputs expected = reference::run(
          [&](const Inputs& in) { return run_reference(in, options); }, inputs, torch::kDouble);
      for (std::size_t keep = 0; keep < block_keep_names().size(); ++keep) {
        options.keep = static_cast<BlockKeep>(keep);
        SCOPED_TRACE(::testing::Message() << "T " << s.T << " C " << s.C << " biases " << biases
                                          << " " << block_keep_names()[keep]);
        for (const auto type : {torch::kFloat, torch::kDouble}) {
          const Inputs actual = reference::run(
              [&](const Inputs& in) { return run_gated_block(in, options); }, inputs, type);
          for (std::size_t i = 0; i < expected.size(); ++i)
            EXPECT_LE(difference(actual[i], expected[i]), tolerance_of(type)) << i;
        }
      }
    }
  }
}

TEST(GatedBlock, GivesTheSameBitsWhateverItKeeps) {
  const BlockSizes s{3, 700, 32, 88, 4, 2, 8};
  for (const double p : {0.0, 0.2}) {
    BlockOptions options = block_options(s);
    options.attention.dropout_p = options.residual_dropout_p = p;
    const Inputs inputs = gated_block_inputs(s, true);
    const auto run = [&](BlockKeep keep) {
      options.keep = keep;
      torch::manual_seed(7);
      return reference::run([&](const Inputs& in) { return run_gated_block(in, options); }, inputs,
                            torch::kFloat);
    };
    const Inputs all = run(BlockKeep::kAll);
    for (const BlockKeep keep : {BlockKeep::kNoGelu, BlockKeep::kNoGeluNorms,
                                 BlockKeep::kNoGeluNormsQkv, BlockKeep::kAttention}) {
      EXPECT_TRUE(reference::same_bits(all, run(keep)))
          << p << " " << block_keep_names()[static_cast<std::size_t>(keep)];
    }
    const torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    EXPECT_TRUE(torch::equal(all[0], run_gated_block(inputs, options))) << "without gradients";
  }
}

TEST(GatedBlock, ByFiniteDifferences) {
  const BlockSizes s{1, 3, 4, 5, 2, 1, 2};
  const BlockOptions options = block_options(s);
  expect_finite_differences([&](const Inputs& in) { return run_gated_block(in, options); },
                            gated_block_inputs(s, true));
}

TEST(GatedBlock, SiluIsExactFarOut) {
  BlockOptions options;
  options.gated = true;
  const Tensor x = torch::linspace(-100, 100, 1001).unsqueeze(1), one = torch::ones({1, 1});
  expect_equal(
      [&](const Inputs& in) {  // up is the bias, 1
        return mlp(in[0],
                   {{},
                    {},
                    torch::tensor({{1.0}, {0.0}}).to(in[0].scalar_type()),
                    torch::tensor({0.0, 1.0}).to(in[0].scalar_type()),
                    one,
                    {}},
                   options);
      },
      [](const Inputs& in) { return in[0] * torch::sigmoid(in[0]); }, {x}, 1e-6);
}

TEST(GatedBlock, EqualsItsReferenceOnEveryTarget) {
  const BlockSizes s{2, 61, 42, 37, 4, 2, 14};
  const BlockOptions options = block_options(s);
  const Inputs inputs = gated_block_inputs(s, true);
  const Inputs expected = reference::run(
      [&](const Inputs& in) { return run_reference(in, options); }, inputs, torch::kDouble);
  std::int64_t disabled = 0;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::DisableTargets(disabled);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    const Inputs actual = reference::run(
        [&](const Inputs& in) { return run_gated_block(in, options); }, inputs, torch::kFloat);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(difference(actual[i], expected[i]), 1e-5) << i;
    disabled |= target;
  }
  hwy::DisableTargets(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(GatedBlock, PassesThroughTheMetaDevice) {
  const BlockSizes s{2, 9, 8, 20, 2, 1, 4};
  Inputs inputs;
  for (const Tensor& t : gated_block_inputs(s, true))
    inputs.push_back(torch::empty(t.sizes(), torch::kMeta).requires_grad_(true));
  const Tensor out = run_gated_block(inputs, block_options(s));
  EXPECT_EQ(out.sizes(), inputs[0].sizes());
  out.backward(torch::empty_like(out));
  for (const Tensor& t : inputs) EXPECT_EQ(t.grad().sizes(), t.sizes());
}

TEST(GatedBlock, RefusesAnOddHiddenLayer) {
  BlockOptions options;
  options.gated = true;
  EXPECT_THROW(mlp(torch::randn({3, 4}),
                   {{}, {}, torch::randn({5, 4}), {}, torch::randn({4, 2}), {}}, options),
               ConfigError);
}

TEST(GatedBlock, GivesTheSameBitsForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  torch::manual_seed(6);
  AttentionOptions options;
  options.causal = true;
  options.num_kv_heads = 2;
  options.rotary = RotaryOptions();
  const Inputs inputs{torch::randn({2, 130, 8 * 24}), torch::randn({1500, 70}), torch::randn({70})};
  std::vector<Inputs> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    results.push_back(reference::run(
        [&](const Inputs& in) {
          return attention(in[0], 4, options).sum() + (rms_norm(in[1], in[2]) * in[1]).sum();
        },
        inputs, torch::kFloat));
  }
  at::set_num_threads(before);
  // The sums of the value are LibTorch's; the gradients are ours.
  for (std::size_t i = 1; i < results[0].size(); ++i) {
    EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
    EXPECT_TRUE(torch::equal(results[0][i], results[2][i])) << i;
  }
}

TEST(Embedding, WithoutPositionsIsTheTokensAlone) {
  const Tensor tokens = torch::randint(0, 9, {4, 6});
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    torch::manual_seed(1);
    expect_equal([&](const Inputs& in) { return token_position_embedding(tokens, in[0], {}); },
                 [&](const Inputs& in) { return torch::embedding(in[0], tokens); },
                 {torch::randn({9, 35})}, 1e-6, type);
  }
}

}  // namespace
}  // namespace headroom
