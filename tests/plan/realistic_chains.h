#pragma once

#include <headroom/config/chain_costs.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom::testing {

/// Numbers of networks that people train, in float32, on a machine of 100 GFLOP/s. Times are FLOPs
/// plus a fixed overhead per stage; backward costs twice the forward. Good enough to plan with; a
/// real run measures its own.
inline std::int64_t time_of(double flops) {
  return static_cast<std::int64_t>(flops / 100.0) + 20000;
}

/// GPT-2 with `num_blocks` blocks, a stage each, between an embedding and a head with the loss. A
/// block can keep everything, spare the attention weights, also spare the GELU and the normalised
/// values, or keep its residual inputs alone.
inline ChainCosts gpt2_chain(std::int64_t batch, int num_blocks = 12, std::int64_t width = 768,
                             std::int64_t num_heads = 12, std::int64_t tokens = 1024,
                             std::int64_t vocabulary = 50257) {
  const std::int64_t unit = batch * tokens * width * 4;
  const std::int64_t weights = batch * num_heads * tokens * tokens * 4;
  const std::int64_t logits = batch * tokens * vocabulary * 4;
  const double rows = static_cast<double>(batch * tokens), c = static_cast<double>(width),
               t = static_cast<double>(tokens);
  ChainCosts chain;

  StageCosts embedding{
      "embedding", unit, unit, time_of(rows * c * 4), unit, (vocabulary + tokens) * width * 4,
      {},          {}};
  embedding.options = {{unit, embedding.forward_ns, 2 * embedding.forward_ns, unit, 0}};
  chain.stages.push_back(embedding);

  const double linear = rows * 24 * c * c, attention = rows * 4 * t * c;
  for (int i = 0; i < num_blocks; ++i) {
    const std::int64_t forward = time_of(linear + attention);
    StageCosts block{
        "block" + std::to_string(i), unit, unit, forward, std::max(2 * weights, 8 * unit),
        12 * width * width * 4,      {},   {}};
    block.options = {
        {16 * unit + 2 * weights, forward, 2 * forward, 0, 2 * weights + 4 * unit},
        {16 * unit, forward, 2 * forward + time_of(attention), 3 * unit, 8 * unit},
        {10 * unit, forward, 2 * forward + time_of(attention) + forward / 50, 6 * unit, 12 * unit},
        {6 * unit, forward, 2 * forward + time_of(attention) + forward / 3, 8 * unit, 14 * unit}};
    chain.stages.push_back(block);
  }

  StageCosts head{"head",        4, 0,  time_of(rows * 2 * c * static_cast<double>(vocabulary)),
                  logits + unit, 0, {}, {}};
  head.options = {{2 * logits + unit, head.forward_ns, 2 * head.forward_ns, 0, logits},
                  {unit, head.forward_ns, 3 * head.forward_ns, logits / 8, logits / 8}};
  chain.stages.push_back(head);
  return chain;
}

/// A convolutional net whose maps shrink while they get more channels: 16 bottlenecks, as ResNet-50
/// has them, stem and head.
inline ChainCosts resnet50_like_chain(std::int64_t batch) {
  ChainCosts chain;
  const auto add = [&](const std::string& name, std::int64_t side, std::int64_t channels,
                       double kept_maps, double flops, bool last) {
    const std::int64_t map = batch * side * side * channels * 4;
    const std::int64_t forward = time_of(flops * static_cast<double>(batch));
    StageCosts stage{name, last ? 4 : map, last ? 0 : map, forward, map / 2, 0, {}, {}};
    const auto kept = static_cast<std::int64_t>(kept_maps * static_cast<double>(map));
    stage.options = {{kept, forward, 2 * forward, 0, map}};
    if (!last)
      stage.options.push_back({kept / 2, forward, 2 * forward + forward / 6, map / 2, map});
    chain.stages.push_back(stage);
  };
  add("stem", 56, 64, 9, 240e6, false);
  const int counts[] = {3, 4, 6, 3};
  std::int64_t side = 56, channels = 256;
  for (int group = 0; group < 4; ++group) {
    for (int i = 0; i < counts[group]; ++i)
      add("stage" + std::to_string(group) + "." + std::to_string(i), side, channels, 4.5, 440e6,
          false);
    side /= 2;
    channels *= 2;
  }
  add("head", 7, 2048, 1.1, 8e6, true);
  return chain;
}

/// An encoder and a decoder: wide maps at both ends, narrow ones in the middle.
inline ChainCosts u_shaped_chain(std::int64_t batch) {
  ChainCosts chain;
  const int depth = 12;
  for (int i = 0; i <= 2 * depth; ++i) {
    const int level = std::min(i, 2 * depth - i);
    const std::int64_t map = batch * (std::int64_t{4} << 20) / (1 + level * level);
    const std::int64_t forward = time_of(static_cast<double>(batch) * (3e8 + 5e7 * level));
    const bool last = i == 2 * depth;
    StageCosts stage{
        "level" + std::to_string(i), last ? 4 : map, last ? 0 : map, forward, map, 0, {}, {}};
    stage.options = {{3 * map, forward, 2 * forward, 0, map},
                     {2 * map, forward, 2 * forward + forward / 4, map, map}};
    chain.stages.push_back(stage);
  }
  return chain;
}

/// A very deep residual net.
inline ChainCosts equal_blocks_chain(int num_blocks, int num_options = 2) {
  ChainCosts chain;
  const std::int64_t map = std::int64_t{1} << 20;
  for (int i = 0; i < num_blocks; ++i) {
    const bool last = i + 1 == num_blocks;
    StageCosts stage{"block" + std::to_string(i), map, last ? 0 : map, 1000000, map, 0, {}, {}};
    for (int k = 0; k < num_options; ++k)
      stage.options.push_back({map * (num_options + 1 - k), 1000000, 2000000 + 100000 * k, 0, map});
    chain.stages.push_back(stage);
  }
  return chain;
}

}  // namespace headroom::testing
