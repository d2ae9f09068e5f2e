#include <headroom/ops/transformer.h>

#include <headroom/core/error.h>

#include "ops/reference_ops.h"

#include "ops/kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using reference::difference;
using torch::Tensor;

struct AttentionShape {
  std::int64_t B, T, H, D;
};
const std::vector<AttentionShape> kAttentionShapes{{1, 1, 1, 1},    {2, 1, 3, 5},   {1, 7, 1, 33},
                                                   {2, 48, 2, 16},  {2, 49, 2, 64}, {1, 257, 1, 20},
                                                   {1, 300, 2, 48}, {3, 129, 2, 8}};

Tensor random_qkv(const AttentionShape& s, double scale = 1.0) {
  torch::manual_seed(s.T * 31 + s.D);
  return torch::randn({s.B, s.T, 3 * s.H * s.D}) * scale;
}

// Visible keys at random; sample 0 sees none of the first keys, and the last sample none at all.
Tensor random_mask(const AttentionShape& s) {
  Tensor mask = torch::rand({s.B, s.T}) < 0.6;
  mask[0].slice(0, 0, s.T / 2).fill_(false);
  mask[s.B - 1].fill_(false);
  return mask;
}

TEST(Attention, EqualsItsTwin) {
  for (const AttentionShape& s : kAttentionShapes) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << "T " << s.T << " H " << s.H << " D " << s.D << " causal " << causal);
      AttentionOptions options;
      options.causal = causal;
      reference::expect_equal(
          [&](const std::vector<Tensor>& in) { return attention(in[0], s.H, options); },
          [&](const std::vector<Tensor>& in) { return reference::attention(in[0], s.H, causal); },
          {random_qkv(s)}, 1e-5);
    }
  }
}

TEST(Attention, EqualsItsTwinWithAMask) {
  for (const AttentionShape& s : kAttentionShapes) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << "T " << s.T << " H " << s.H << " D " << s.D << " causal " << causal);
      AttentionOptions options;
      options.causal = causal;
      const Tensor qkv = random_qkv(s);
      options.key_mask = random_mask(s);
      reference::expect_equal(
          [&](const std::vector<Tensor>& in) { return attention(in[0], s.H, options); },
          [&](const std::vector<Tensor>& in) {
            return reference::attention(in[0], s.H, causal, options.key_mask);
          },
          {qkv}, 1e-5);
    }
  }
}

TEST(Attention, TakesDouble) {
  for (const bool masked : {false, true}) {
    const AttentionShape s{2, 9, 2, 5};
    AttentionOptions options;
    options.causal = true;
    const Tensor qkv = random_qkv(s).to(torch::kDouble);
    if (masked) options.key_mask = random_mask(s);
    reference::expect_equal(
        [&](const std::vector<Tensor>& in) { return attention(in[0], s.H, options); },
        [&](const std::vector<Tensor>& in) {
          return reference::attention(in[0], s.H, true, options.key_mask);
        },
        {qkv}, 1e-10, torch::kDouble);
  }
}

TEST(Attention, GradientIsThatOfFiniteDifferences) {
  const AttentionShape s{1, 5, 2, 3};
  AttentionOptions options;
  options.causal = true;
  const Tensor qkv = random_qkv(s);
  const auto value = [&](const Tensor& at) {
    return attention(at, s.H, options).to(torch::kDouble).pow(2).sum().item<double>();
  };
  Tensor leaf = qkv.clone().requires_grad_(true);
  attention(leaf, s.H, options).pow(2).sum().backward();
  for (std::int64_t i = 0; i < qkv.numel(); i += 7) {
    Tensor up = qkv.clone(), down = qkv.clone();
    up.view(-1)[i] += 1e-2;
    down.view(-1)[i] -= 1e-2;
    EXPECT_NEAR((value(up) - value(down)) / 2e-2, leaf.grad().view(-1)[i].item<double>(), 2e-3)
        << i;
  }
}

TEST(Attention, LetsNanThrough) {
  const AttentionShape s{1, 20, 1, 16};
  Tensor qkv = random_qkv(s);
  qkv[0][3][0] = std::nan("");
  EXPECT_TRUE(attention(qkv, 1).isnan().any().item<bool>());
}

TEST(Attention, LengthsAreAMask) {
  const AttentionShape s{3, 300, 2, 16};
  AttentionOptions by_length, by_mask;
  by_length.key_lengths = torch::tensor({0, 7, 300});
  by_mask.key_mask = torch::arange(300).unsqueeze(0) < by_length.key_lengths.unsqueeze(1);
  const Tensor qkv = random_qkv(s);
  const Tensor y = attention(qkv, s.H, by_length);
  EXPECT_TRUE(torch::equal(y, attention(qkv, s.H, by_mask)));
  EXPECT_EQ(y[0].abs().max().item<float>(), 0.0f);
}

TEST(Attention, DoesNotDependOnThreads) {
  const AttentionShape s{2, 130, 3, 24};
  AttentionOptions options;
  options.causal = true;
  options.dropout_p = 0.1;
  const auto function = [&](const std::vector<Tensor>& in) {
    return attention(in[0], s.H, options);
  };
  const int before = at::get_num_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 4}) {
    at::set_num_threads(threads);
    torch::manual_seed(5);
    const Tensor qkv = random_qkv(s);
    results.push_back(reference::run(function, {qkv}, torch::kFloat));
  }
  at::set_num_threads(before);
  EXPECT_TRUE(reference::same_bits(results[0], results[1]));
  EXPECT_TRUE(reference::same_bits(results[0], results[2]));
}

// What attention with dropout keeps, read off its values: with one-hot values, the output is the
// dropped attention weights.
Tensor attention_weights(const Tensor& qk, std::int64_t T, double p, std::uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor qkv = torch::cat({qk, torch::eye(T).unsqueeze(0)}, 2);
  AttentionOptions options;
  options.dropout_p = p;
  return attention(qkv, 1, options);
}

TEST(Attention, DropoutDropsAShareAndScalesTheRest) {
  const std::int64_t T = 64;
  const Tensor qk = torch::zeros({1, T, 2 * T});
  const Tensor weights = attention_weights(qk, T, 0.25, 3) * static_cast<double>(T);
  const Tensor dropped = weights == 0;
  EXPECT_NEAR(dropped.to(torch::kFloat).mean().item<double>(), 0.25, 0.03);
  EXPECT_LE(difference(weights.masked_select(dropped.logical_not()),
                       torch::full({(~dropped).sum().item<std::int64_t>()}, 1 / 0.75)),
            1e-5);
  EXPECT_TRUE(torch::equal(attention_weights(qk, T, 0.25, 3), attention_weights(qk, T, 0.25, 3)));
  EXPECT_FALSE(torch::equal(attention_weights(qk, T, 0.25, 3), attention_weights(qk, T, 0.25, 4)));
}

TEST(Attention, BackwardDropsWhatForwardDropped) {
  const std::int64_t T = 40;
  const Tensor keep = attention_weights(torch::zeros({1, T, 2 * T}), T, 0.3, 9) *
                      static_cast<double>(T);  // (1, T, T) of 0 or 1 / (1 - p)
  AttentionOptions options;
  options.dropout_p = 0.3;
  reference::expect_equal(
      [&](const std::vector<Tensor>& in) {
        torch::manual_seed(9);
        return attention(in[0], 1, options);
      },
      [&](const std::vector<Tensor>& in) {
        return reference::attention(in[0], 1, false, {}, keep.to(torch::kDouble));
      },
      {random_qkv({1, T, 1, 12})}, 1e-5);
}

TEST(Attention, WorksMetaSwapScopeOnTheMetaDevice) {
  const Tensor qkv = torch::empty({2, 30, 3 * 32}, torch::kMeta);
  EXPECT_EQ(attention(qkv, 4).sizes(), torch::IntArrayRef({2, 30, 32}));
}

TEST(Attention, RefusesSizesThatDoNotFit) {
  EXPECT_THROW(attention(torch::zeros({1, 2, 10}), 2), ConfigError);
  EXPECT_THROW(attention(torch::zeros({2, 12}), 2), ConfigError);
  AttentionOptions options;
  options.key_mask = torch::ones({1, 3}, torch::kBool);
  EXPECT_THROW(attention(torch::zeros({1, 2, 12}), 2, options), ConfigError);
}

}  // namespace
}  // namespace headroom
