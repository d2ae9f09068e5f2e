#pragma once

// The tensors of a transformer block as one list, which is what references take.

#include <headroom/ops/transformer.h>

#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace headroom::testing {

/// x, then the weights of both halves in the order of the structs.
inline std::vector<at::Tensor> block_inputs(std::int64_t num_samples, std::int64_t length,
                                            std::int64_t width, std::int64_t hidden, bool biases) {
  const auto bias = [&](std::int64_t n) { return biases ? torch::randn({n}) * 0.1 : at::Tensor(); };
  const auto linear = [](std::int64_t out, std::int64_t in) {
    return torch::randn({out, in}) / std::sqrt(static_cast<double>(in));
  };
  return {torch::randn({num_samples, length, width}),
          torch::rand({width}) + 0.5,
          bias(width),
          linear(3 * width, width),
          bias(3 * width),
          linear(width, width),
          bias(width),
          torch::rand({width}) + 0.5,
          bias(width),
          linear(hidden, width),
          bias(hidden),
          linear(width, hidden),
          bias(width)};
}

inline AttentionWeights attention_of(const std::vector<at::Tensor>& in) {
  return {in[1], in[2], in[3], in[4], in[5], in[6]};
}

inline MlpWeights mlp_of(const std::vector<at::Tensor>& in) {
  return {in[7], in[8], in[9], in[10], in[11], in[12]};
}

inline at::Tensor run_block(const std::vector<at::Tensor>& in, const BlockOptions& options) {
  return transformer_block(in[0], attention_of(in), mlp_of(in), options);
}

}  // namespace headroom::testing
