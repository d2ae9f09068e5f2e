#pragma once

#include <torch/torch.h>

#include <cmath>
#include <string>

namespace headroom::testing {

/// A pre-norm transformer block with dropout, in plain LibTorch.
class TransformerBlockImpl : public torch::nn::Module {
 public:
  TransformerBlockImpl(std::int64_t width, std::int64_t num_heads, double dropout)
      : num_heads_(num_heads),
        norm1_(
            register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2_(
            register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv_(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        projection_(register_module("projection", torch::nn::Linear(width, width))),
        up_(register_module("up", torch::nn::Linear(width, 4 * width))),
        down_(register_module("down", torch::nn::Linear(4 * width, width))),
        dropout_(register_module("dropout", torch::nn::Dropout(dropout))) {}

  /// x (B, T, C); mask (T, T), true where attention is forbidden; undefined for none.
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask = {}) {
    const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const std::int64_t head = width / num_heads_;
    const torch::Tensor qkv =
        qkv_(norm1_(x)).view({batch, length, 3, num_heads_, head}).permute({2, 0, 3, 1, 4});
    torch::Tensor scores = torch::matmul(qkv[0], qkv[1].transpose(-2, -1)) /
                           std::sqrt(static_cast<double>(head));  // (B, H, T, T)
    if (mask.defined()) scores = scores.masked_fill(mask, -1e9);
    const torch::Tensor attention = dropout_(torch::softmax(scores, -1));
    x = x + dropout_(projection_(
                torch::matmul(attention, qkv[2]).transpose(1, 2).reshape({batch, length, width})));
    return x + dropout_(down_(torch::gelu(up_(norm2_(x)))));
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  std::int64_t num_heads_;
  torch::nn::LayerNorm norm1_, norm2_;
  torch::nn::Linear qkv_, projection_, up_, down_;
  torch::nn::Dropout dropout_;
};
TORCH_MODULE(TransformerBlock);

/// Token embedding, blocks, and a head that gives logits.
class SmallGptImpl : public torch::nn::Module {
 public:
  SmallGptImpl(std::int64_t num_tokens, std::int64_t width, std::int64_t num_blocks, double dropout)
      : embedding_(register_module("embedding", torch::nn::Embedding(num_tokens, width))),
        head_(register_module("head", torch::nn::Linear(width, num_tokens))) {
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      blocks_.push_back(
          register_module("block" + std::to_string(i), TransformerBlock(width, 4, dropout)));
    }
  }

  /// tokens (B, T) to a mean loss.
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& targets) {
    torch::Tensor x = embedding_(tokens);
    for (TransformerBlock& block : blocks_) x = block->forward(x);
    const torch::Tensor logits = head_(x);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }

 private:
  torch::nn::Embedding embedding_;
  torch::nn::Linear head_;
  std::vector<TransformerBlock> blocks_;
};
TORCH_MODULE(SmallGpt);

inline void clear_gradients(torch::nn::Module& module) {
  for (torch::Tensor& parameter : module.parameters()) parameter.mutable_grad() = torch::Tensor();
}

}  // namespace headroom::testing
