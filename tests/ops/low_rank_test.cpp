// Adapters inside of the transformer's ops: as if they were merged into their layers' weights.
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/ops/transformer.h>

#include "ops/block_inputs.h"
#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace headroom {
namespace {

using testing::attention_of;
using testing::mlp_of;
using torch::Tensor;

constexpr std::int64_t kWidth = 12, kHidden = 20, kRank = 3;
constexpr double kScale = 1.7;

struct AdaptedShape {
  bool gated = false, post_norm = false;
  std::int64_t num_rows = 7;
};

struct Place {
  std::int64_t in, first_row, num_rows;
};

// Queries and values of qkv, then the three other layers whole; of a gated MLP up alone.
std::vector<Place> places_of(const AdaptedShape& shape) {
  return {{kWidth, 0, kWidth},
          {kWidth, 2 * kWidth, kWidth},
          {kWidth, 0, kWidth},
          {kWidth, shape.gated ? kHidden : 0, kHidden},
          {kHidden, 0, kWidth}};
}

// x, twelve weights of the block, then down and up of each adapter.
std::vector<Tensor> adapted_inputs(const AdaptedShape& shape) {
  torch::manual_seed(3);
  const auto linear = [](std::int64_t out, std::int64_t in) {
    return torch::randn({out, in}) / std::sqrt(static_cast<double>(in));
  };
  const std::int64_t hidden = shape.gated ? 2 * kHidden : kHidden;
  std::vector<Tensor> in = {torch::randn({2, shape.num_rows, kWidth}),
                            torch::rand({kWidth}) + 0.5,
                            torch::randn({kWidth}) * 0.1,
                            linear(3 * kWidth, kWidth),
                            torch::randn({3 * kWidth}) * 0.1,
                            linear(kWidth, kWidth),
                            torch::randn({kWidth}) * 0.1,
                            torch::rand({kWidth}) + 0.5,
                            torch::randn({kWidth}) * 0.1,
                            linear(hidden, kWidth),
                            torch::randn({hidden}) * 0.1,
                            linear(kWidth, kHidden),
                            torch::randn({kWidth}) * 0.1};
  for (const Place& place : places_of(shape)) {
    in.push_back(linear(kRank, place.in));
    in.push_back(linear(place.num_rows, kRank));
  }
  return in;
}

BlockOptions options_of(const AdaptedShape& shape) {
  BlockOptions options;
  options.num_heads = 3;
  options.attention.causal = true;
  options.gated = shape.gated;
  options.adapter_scale = kScale;
  return options;
}

Tensor run_adapted(const AdaptedShape& shape, const Tensor& x, const AttentionWeights& attention,
                   const MlpWeights& mlp, const BlockOptions& options) {
  return (shape.post_norm ? post_norm_block : transformer_block)(x, attention, mlp, options);
}

Tensor adapted(const AdaptedShape& shape, const std::vector<Tensor>& in,
               const BlockOptions& options) {
  AttentionWeights attention = attention_of(in);
  MlpWeights mlp = mlp_of(in);
  const std::vector<Place> places = places_of(shape);
  const auto adapter = [&](std::size_t i) {
    return LowRank{in[13 + 2 * i], in[14 + 2 * i], places[i].first_row};
  };
  attention.qkv_adapters = {adapter(0), adapter(1)};
  attention.proj_adapters = {adapter(2)};
  mlp.hidden_adapters = {adapter(3)};
  mlp.out_adapters = {adapter(4)};
  return run_adapted(shape, in[0], attention, mlp, options);
}

Tensor merged(const AdaptedShape& shape, const std::vector<Tensor>& in) {
  const std::vector<Place> places = places_of(shape);
  const auto with = [&](const Tensor& weight, std::size_t i) {
    const Place& place = places[i];
    return weight + torch::constant_pad_nd(
                        torch::mm(in[14 + 2 * i], in[13 + 2 * i]) * kScale,
                        {0, 0, place.first_row, weight.size(0) - place.first_row - place.num_rows});
  };
  AttentionWeights attention = attention_of(in);
  MlpWeights mlp = mlp_of(in);
  attention.qkv_weight = with(with(in[3], 0), 1);
  attention.proj_weight = with(in[5], 2);
  mlp.hidden_weight = with(in[9], 3);
  mlp.out_weight = with(in[11], 4);
  return run_adapted(shape, in[0], attention, mlp, options_of(shape));
}

const AdaptedShape kAdaptedShapes[] = {{}, {true, false, 7}, {false, true, 7}, {true, false, 1300}};

TEST(LowRank, IsALargerWeight) {
  for (const AdaptedShape& shape : kAdaptedShapes) {
    reference::expect_equal(
        [&](const std::vector<Tensor>& in) { return adapted(shape, in, options_of(shape)); },
        [&](const std::vector<Tensor>& in) { return merged(shape, in); }, adapted_inputs(shape),
        shape.num_rows < 1000 ? 1e-5 : 2e-5);  // gradients are sums over the rows
  }
  reference::expect_equal(
      [&](const std::vector<Tensor>& in) { return adapted({}, in, options_of({})); },
      [&](const std::vector<Tensor>& in) { return merged({}, in); }, adapted_inputs({}), 1e-10,
      torch::kDouble);
}

// Which tensors are trained, by their place among the inputs.
using IsTrained = bool (*)(std::size_t index);

std::vector<Tensor> results_of(const AdaptedShape& shape, BlockOptions options, BlockKeep keep,
                               IsTrained is_trained, std::int64_t* kept_bytes = nullptr) {
  std::vector<Tensor> in = adapted_inputs(shape);
  for (std::size_t i = 0; i < in.size(); ++i) in[i].requires_grad_(is_trained(i));
  options.keep = keep;
  torch::manual_seed(8);
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  Tensor y = adapted(shape, in, options);
  if (kept_bytes != nullptr) *kept_bytes = meter.live_bytes() - before;
  y.square().sum().backward();
  std::vector<Tensor> results = {y.detach()};
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(in[i].grad().defined(), is_trained(i)) << i;
    if (is_trained(i)) results.push_back(in[i].grad());
  }
  return results;
}

TEST(LowRank, EveryWayToKeepGivesTheSameBitsWithDropoutAndFrozenWeights) {
  const IsTrained trained[] = {[](std::size_t) { return true; },
                               [](std::size_t i) { return i == 0 || i >= 13; },
                               [](std::size_t i) { return i >= 13; },
                               [](std::size_t i) { return i >= 19; }};  // of the MLP alone
  for (const AdaptedShape& shape : kAdaptedShapes) {
    for (const IsTrained is_trained : trained) {
      BlockOptions options = options_of(shape);
      options.adapter_dropout_p = 0.3;
      options.residual_dropout_p = options.attention.dropout_p = 0.2;
      const std::vector<Tensor> first = results_of(shape, options, BlockKeep::kAll, is_trained);
      for (int keep = 1; keep <= static_cast<int>(BlockKeep::kAttention); ++keep) {
        EXPECT_TRUE(reference::same_bits(
            first, results_of(shape, options, static_cast<BlockKeep>(keep), is_trained)))
            << keep;
      }
    }
  }
}

// The gradient of a sum of squares, along one direction, by differences in double steps of float.
TEST(LowRank, DropoutHasTheGradientOfItsForward) {
  const AdaptedShape shape;
  BlockOptions options = options_of(shape);
  options.adapter_dropout_p = 0.4;
  const std::vector<Tensor> in = adapted_inputs(shape);
  std::vector<Tensor> leaves, directions;
  for (const Tensor& tensor : in) {
    leaves.push_back(tensor.clone().requires_grad_());
    directions.push_back(torch::randn_like(tensor));
  }
  const auto value = [&](const std::vector<Tensor>& at) {
    torch::manual_seed(8);
    return adapted(shape, at, options).to(torch::kDouble).square().sum();
  };
  value(leaves).backward();
  double expected = 0;
  for (std::size_t i = 0; i < in.size(); ++i)
    expected += (leaves[i].grad() * directions[i]).sum().item<double>();
  const auto moved = [&](double step) {
    std::vector<Tensor> at;
    for (std::size_t i = 0; i < in.size(); ++i) at.push_back(in[i] + step * directions[i]);
    return value(at).item<double>();
  };
  const double measured = (moved(1e-3) - moved(-1e-3)) / 2e-3;
  EXPECT_NEAR(measured, expected, 1e-2 * std::abs(expected));
}

TEST(LowRank, WhatOnlyGradientsOfFrozenWeightsNeedIsNotKept) {
  const AdaptedShape shape{false, false, 64};
  const BlockOptions options = options_of(shape);
  std::int64_t trained = 0, frozen = 0, no_gelu_norms = 0;
  const auto all = [](std::size_t) { return true; };
  // Adapters of the attention's second layer alone, so that neither a norm nor the GELU is read.
  std::vector<Tensor> in = adapted_inputs(shape);
  for (std::size_t i = 0; i < in.size(); ++i) in[i].requires_grad_(i == 0);
  const auto kept_by = [&](BlockKeep keep) {
    BlockOptions now = options;
    now.keep = keep;
    const std::int64_t before = MemoryMeter::instance().live_bytes();
    const Tensor y = run_adapted(shape, in[0], attention_of(in), mlp_of(in), now);
    return MemoryMeter::instance().live_bytes() - before;
  };
  results_of(shape, options, BlockKeep::kAll, all, &trained);
  frozen = kept_by(BlockKeep::kAll);
  no_gelu_norms = kept_by(BlockKeep::kNoGeluNorms);
  EXPECT_EQ(frozen, no_gelu_norms);
  EXPECT_LT(frozen, trained);
}

TEST(LowRank, RefusesSizesThatDoNotFit) {
  std::vector<Tensor> in = adapted_inputs({});
  in[14] = torch::randn({kWidth, kRank + 1});
  EXPECT_THROW(adapted({}, in, options_of({})), ConfigError);
}

}  // namespace
}  // namespace headroom
