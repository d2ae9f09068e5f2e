#pragma once

// A model whose loss compares every sample of a batch with every other one.

#include <headroom/core/random.h>
#include <headroom/model/chain.h>

#include "train/training_support.h"

#include <torch/torch.h>

#include <memory>
#include <vector>

namespace headroom::testing {

class CompareStage : public Stage {
 public:
  CompareStage()
      : Stage("compare"), scale_(module_->register_parameter("scale", torch::full({}, 0.3))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& e, const MicroBatch& /*micro*/,
                                  int /*option*/) override {
    const at::Tensor scores = torch::mm(e.at(0), e.at(1).t()) * scale_.exp();  // (B, B)
    const at::Tensor both = torch::log_softmax(scores, 1) + torch::log_softmax(scores, 0);
    std::vector<at::Tensor> results{both.diag().sum() / -2};
    if (!module_->is_training())
      results.push_back(scores.argmax(1).eq(torch::arange(scores.size(0))).sum());
    return results;
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool couples_samples() const override { return true; }

 private:
  std::shared_ptr<torch::nn::Module> module_ = std::make_shared<torch::nn::Module>();
  at::Tensor scale_;
};

/// The same, saying that it depends on embeddings alone.
class CompareEmbeddings final : public CompareStage, public EmbeddingLoss {};

/// Two views of each row of TableData, compared with those of the other rows.
inline Chain compared_chain(std::uint64_t seed, double dropout = 0.0, bool has_batch_norm = false,
                            bool by_embeddings = true) {
  seed_everything(seed);
  torch::nn::Sequential body(torch::nn::Linear(kWidth, 16), torch::nn::Tanh(),
                             torch::nn::Dropout(dropout));
  if (has_batch_norm) body->push_back(torch::nn::BatchNorm1d(16));
  torch::nn::Sequential left(torch::nn::Linear(16, 8)), right(torch::nn::Linear(16, 8));
  auto towers = std::make_shared<torch::nn::Module>();
  towers->register_module("left", left);
  towers->register_module("right", right);
  Chain chain;
  chain.add("body", body.ptr(),
            [body](const std::vector<at::Tensor>& x, const MicroBatch&) mutable {
              return std::vector<at::Tensor>{body->forward(x.at(0))};
            });
  chain.add("towers", towers,
            [left, right](const std::vector<at::Tensor>& x, const MicroBatch&) mutable {
              return std::vector<at::Tensor>{left->forward(x.at(0)), right->forward(x.at(0))};
            });
  if (by_embeddings) return chain.add(std::make_shared<CompareEmbeddings>());
  chain.add(std::make_shared<CompareStage>());
  return chain;
}

}  // namespace headroom::testing
