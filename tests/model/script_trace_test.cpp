// A module of C++ as a chain, by tracing.
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>

#include "model/script_models.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace headroom {
namespace {

namespace nn = torch::nn;

class BlockImpl : public nn::Module {
 public:
  explicit BlockImpl(std::int64_t width)
      : conv_(register_module("conv", nn::Conv2d(nn::Conv2dOptions(width, width, 3).padding(1)))),
        norm_(register_module("norm", nn::BatchNorm2d(width))) {}
  at::Tensor forward(const at::Tensor& x) { return (norm_(conv_(x)) + x).relu_(); }

 private:
  nn::Conv2d conv_;
  nn::BatchNorm2d norm_;
};
TORCH_MODULE(Block);

class NetImpl : public nn::Module {
 public:
  NetImpl()
      : stem_(register_module("stem", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).padding(1)))),
        head_(register_module("head", nn::Linear(8, 10))),
        drop_(register_module("drop", nn::Dropout(0.3))) {
    for (int i = 0; i < 4; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), Block(8)));
  }
  at::Tensor forward(const at::Tensor& image) {
    at::Tensor x = stem_(image);
    for (Block& block : blocks_) x = block(x);
    return head_(drop_(x.mean({2, 3}).view({x.size(0), 8})));
  }

 private:
  nn::Conv2d stem_;
  nn::Linear head_;
  nn::Dropout drop_;
  std::vector<Block> blocks_;
};
TORCH_MODULE(Net);

// The identity, whose gradient is doubled: a trace does not show it.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * 2};
  }
};

MicroBatch batch_of(std::vector<at::Tensor> inputs) {
  MicroBatch micro;
  micro.num_samples = micro.num_items = inputs[0].size(0);
  micro.targets = {torch::randint(0, 10, {micro.num_samples})};
  micro.inputs = std::move(inputs);
  return micro;
}

TEST(ScriptTrace, AModuleIsItselfAtEveryBatchSize) {
  seed_everything(3);
  Net net;
  const at::Tensor mean = net->named_buffers()["block0.norm.running_mean"].clone();
  const Chain chain = Chain::from_module(net, {torch::randn({4, 1, 12, 12})}, summed_cross_entropy);
  EXPECT_GT(chain.size(), 3U);
  EXPECT_TRUE(torch::equal(mean, net->named_buffers()["block0.norm.running_mean"]));
  for (const std::int64_t size : {4, 3, 6})
    EXPECT_NO_THROW(check_whole_model(chain, batch_of({torch::randn({size, 1, 12, 12})})));
}

TEST(ScriptTrace, TrainsTheModulesOwnParameters) {
  seed_everything(3);
  Net net;
  const MicroBatch micro = batch_of({torch::randn({4, 1, 12, 12})});
  const Chain chain = Chain::from_module(net, micro.inputs, summed_cross_entropy);
  Executor(chain).accumulate(micro, keep_everything(chain.size()), 1.0);
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
}

TEST(ScriptTrace, AModuleOfTwoInputs) {
  seed_everything(3);
  nn::Transformer transformer(nn::TransformerOptions(16, 2, 1, 1).dim_feedforward(32).dropout(0.1));
  const MicroBatch micro = batch_of({torch::randn({6, 4, 16}), torch::randn({5, 4, 16})});
  const Chain chain = Chain::from_module(transformer, micro.inputs, testing::weigh_everything);
  EXPECT_NO_THROW(check_whole_model(chain, micro));
}

TEST(ScriptTrace, WhatATraceDoesNotShowIsRefused) {
  seed_everything(3);
  nn::Linear a(8, 8), b(8, 10);
  const nn::Sequential both(a, b);
  const MicroBatch micro = batch_of({torch::randn({4, 8})});
  using Tensors = std::vector<at::Tensor>;
  const Chain doubled = Chain::from_function(
      both.ptr(),
      [a, b](const Tensors& x, const MicroBatch&) mutable {
        return Tensors{b(Doubled::apply(a(x[0])))};
      },
      micro.inputs, summed_cross_entropy);
  EXPECT_THROW(check_whole_model(doubled, micro), ConfigError);
  const Chain guarded = Chain::from_function(
      both.ptr(),
      [a, b](const Tensors& x, const MicroBatch&) mutable {
        at::Tensor h;
        {
          const torch::NoGradGuard no_grad;
          h = a(x[0]);
        }
        return Tensors{b(h) + b(a(x[0]))};
      },
      micro.inputs, summed_cross_entropy);
  EXPECT_THROW(check_whole_model(guarded, micro), ConfigError);
}

}  // namespace
}  // namespace headroom
