// The ops of this project under autocast, on floats and on bf16 numbers: values close to those in
// fp32, and parameter gradients in fp32.
#include <headroom/execute/autocast.h>
#include <headroom/ops/transformer.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace headroom {
namespace {

constexpr std::int64_t kSamples = 2, kLength = 12, kChannels = 32;

at::Tensor parameter(at::IntArrayRef sizes) { return (0.2 * torch::randn(sizes)).requires_grad_(); }

struct OpCase {
  std::string name;
  std::vector<at::Tensor> parameters;
  std::function<at::Tensor(const at::Tensor& x)> op;  // x (B, T, C)
};

std::vector<OpCase> cases() {
  torch::manual_seed(3);
  std::vector<OpCase> all;
  const auto norm_weight = parameter({kChannels}), norm_bias = parameter({kChannels});
  all.push_back({"layer_norm", {norm_weight, norm_bias}, [=](const at::Tensor& x) {
                   return layer_norm(x, norm_weight, norm_bias);
                 }});
  const auto weight = parameter({3 * kChannels, kChannels}), bias = parameter({3 * kChannels});
  all.push_back({"linear", {weight, bias}, [=](const at::Tensor& x) {
                   return linear(x.flatten(0, 1), weight, bias);
                 }});
  all.push_back(
      {"attention", {weight, bias}, [=](const at::Tensor& x) {
         AttentionOptions options;
         options.causal = true;
         return attention(
             linear(x.flatten(0, 1), weight, bias).view({kSamples, kLength, 3 * kChannels}), 4,
             options);
       }});
  const auto words = parameter({50, kChannels});
  const at::Tensor targets = torch::randint(50, {kSamples, kLength});
  all.push_back({"cross_entropy", {words}, [=](const at::Tensor& x) {
                   return linear_cross_entropy(x, words, targets);
                 }});
  const AttentionWeights attend{
      norm_weight,           norm_bias, weight, bias, parameter({kChannels, kChannels}),
      parameter({kChannels})};
  const MlpWeights wide{norm_weight,
                        norm_bias,
                        parameter({4 * kChannels, kChannels}),
                        parameter({4 * kChannels}),
                        parameter({kChannels, 4 * kChannels}),
                        parameter({kChannels})};
  all.push_back(
      {"block",
       {weight, bias, attend.proj_weight, wide.hidden_weight, wide.out_weight, wide.out_bias},
       [=](const at::Tensor& x) {
         BlockOptions options;
         options.num_heads = 4;
         options.attention.causal = true;
         return transformer_block(x, attend, wide, options);
       }});
  const AttentionWeights grouped{norm_weight,        {}, parameter({2 * kChannels, kChannels}), {},
                                 attend.proj_weight, {}};
  const MlpWeights gated{norm_weight,
                         {},
                         parameter({6 * kChannels, kChannels}),
                         {},
                         parameter({kChannels, 3 * kChannels}),
                         {}};
  all.push_back({"gated block",
                 {norm_weight, grouped.qkv_weight, gated.hidden_weight, gated.out_weight},
                 [=](const at::Tensor& x) {
                   BlockOptions options;
                   options.num_heads = 4;
                   options.attention.causal = true;
                   options.attention.num_kv_heads = 2;
                   options.attention.rotary = RotaryOptions();
                   options.norm = NormKind::kRms;
                   options.gated = true;
                   return transformer_block(x, grouped, gated, options);
                 }});
  all.push_back({"mlp", {wide.hidden_weight, wide.out_weight}, [=](const at::Tensor& x) {
                   return mlp(x, wide);
                 }});
  return all;
}

struct OpOutcome {
  at::Tensor value;
  std::vector<at::Tensor> gradients;  // of x first
};

OpOutcome run_op(const OpCase& each, const at::Tensor& values, at::ScalarType type,
                 bool autocasts) {
  const at::Tensor x = values.to(type).requires_grad_();
  OpOutcome outcome;
  {
    std::optional<Autocast> scope;
    if (autocasts) scope.emplace(at::kCPU, at::kBFloat16);
    outcome.value = each.op(x).to(at::kFloat);
  }
  std::vector<at::Tensor> inputs = each.parameters;
  inputs.insert(inputs.begin(), x);
  outcome.gradients = torch::autograd::grad({outcome.value.square().sum()}, inputs);
  EXPECT_EQ(outcome.gradients[0].scalar_type(), type);
  for (std::size_t i = 1; i < inputs.size(); ++i)
    EXPECT_EQ(outcome.gradients[i].scalar_type(), at::kFloat) << "parameter " << i - 1;
  return outcome;
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kFloat) - b).norm() / b.norm()).item<double>();
}

TEST(OpsUnderAutocast, TakeFloatsAndHalvesAndStayClose) {
  for (const OpCase& each : cases()) {
    torch::manual_seed(4);
    const at::Tensor values =
        torch::randn({kSamples, kLength, kChannels}).to(at::kBFloat16).to(at::kFloat);
    const OpOutcome exact = run_op(each, values, at::kFloat, false);
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(each.name + " of " + c10::toString(type));
      const OpOutcome half = run_op(each, values, type, true);
      EXPECT_LE(relative_error(half.value, exact.value), 0.02);
      for (std::size_t i = 0; i < exact.gradients.size(); ++i) {
        EXPECT_LE(relative_error(half.gradients[i], exact.gradients[i]), 0.03) << "gradient " << i;
      }
    }
  }
}

TEST(OpsUnderAutocast, WhatHasAProductGivesBf16AndALossIsAFloat) {
  const std::vector<OpCase> all = cases();
  const at::Tensor x = torch::randn({kSamples, kLength, kChannels});
  const Autocast autocast(at::kCPU, at::kBFloat16);
  for (const OpCase& each : all) {
    const bool is_float = each.name == "layer_norm" || each.name == "cross_entropy";
    EXPECT_EQ(each.op(x).scalar_type(), is_float ? at::kFloat : at::kBFloat16) << each.name;
  }
  EXPECT_EQ(token_position_embedding(torch::zeros({1, 3}, torch::kLong), torch::ones({4, 8}),
                                     torch::ones({3, 8}))
                .scalar_type(),
            at::kBFloat16);
  EXPECT_EQ(dropout(x, 0.5).scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace headroom
