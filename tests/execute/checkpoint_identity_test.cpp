// Losses, gradients, buffers and the random stream are bit-identical with and without checkpoint.
#include <headroom/execute/checkpoint.h>

#include "execute/checkpoint_support.h"

namespace headroom {
namespace {

using namespace torch::nn;  // NOLINT(google-build-using-namespace): the test reads as a list of
                            // LibTorch models
using testing::expect_identical;
using testing::Outcome;
using testing::run_step;
using testing::TransformerBlock;
using torch::Tensor;

// Calls fn plainly or as a checkpoint, as the test asks.
struct MaybeCheckpoint {
  bool on;
  template <typename Fn, typename... Args>
  auto operator()(Fn fn, Args&&... args) const {
    return on ? checkpoint(fn, std::forward<Args>(args)...)
              : detail::call(fn, std::forward<Args>(args)...);
  }
};

void expect_transparent(Module& module, const std::vector<Tensor>& leaves,
                        const std::function<Tensor(MaybeCheckpoint)>& forward) {
  const Outcome plain = run_step(module, leaves, [&] { return forward(MaybeCheckpoint{false}); });
  const Outcome checkpointed =
      run_step(module, leaves, [&] { return forward(MaybeCheckpoint{true}); });
  expect_identical(checkpointed, plain);
  const auto has_gradient = [](const Tensor& gradient) {
    return gradient.defined() && gradient.abs().max().item<double>() > 0;
  };
  EXPECT_TRUE(std::any_of(plain.gradients.begin(), plain.gradients.end(), has_gradient))
      << "the test compares nothing";
}

TEST(CheckpointIdentityTest, MlpWithDropout) {
  torch::manual_seed(1);
  Sequential mlp(Linear(20, 64), ReLU(), Dropout(0.3), Linear(64, 64), GELU(), Dropout(0.5),
                 Linear(64, 5));
  const Tensor x = torch::randn({8, 20}).requires_grad_();
  expect_transparent(*mlp, {x}, [&](MaybeCheckpoint call) { return call(mlp, x).pow(2).mean(); });
  expect_transparent(*mlp, {x}, [&](MaybeCheckpoint call) {
    Tensor y = x;
    for (AnyModule& layer : *mlp) y = call(layer, y);
    return y.pow(2).mean();
  });
}

TEST(CheckpointIdentityTest, CnnWithBatchNorm) {
  torch::manual_seed(2);
  for (const c10::optional<double> momentum :
       {c10::optional<double>(0.1), c10::optional<double>()}) {
    Sequential cnn(Conv2d(Conv2dOptions(3, 8, 3).padding(1)),
                   BatchNorm2d(BatchNorm2dOptions(8).momentum(momentum)), ReLU(),
                   Conv2d(Conv2dOptions(8, 8, 3).padding(1)),
                   BatchNorm2d(BatchNorm2dOptions(8).momentum(momentum)), ReLU(), MaxPool2d(2),
                   Flatten(), Linear(8 * 16, 10),
                   BatchNorm1d(BatchNorm1dOptions(10).momentum(momentum)), Dropout(0.2),
                   Linear(10, 4));
    const Tensor images = torch::randn({6, 3, 8, 8});
    expect_transparent(*cnn, {},
                       [&](MaybeCheckpoint call) { return call(cnn, images).pow(2).mean(); });
    expect_transparent(*cnn, {}, [&](MaybeCheckpoint call) {
      return call([&](const Tensor& x) { return cnn->forward(x); }, images).pow(2).mean();
    });
    const Outcome plain = run_step(*cnn, {}, [&] { return cnn->forward(images).pow(2).mean(); });
    EXPECT_EQ(plain.buffers[2].item<std::int64_t>(), 1)
        << "num_batches_tracked is among what is compared";
    for (const CheckpointStrategy& strategy :
         {CheckpointStrategy::every(), CheckpointStrategy::sqrt(), CheckpointStrategy::log(),
          CheckpointStrategy(2)}) {
      expect_identical(
          run_step(*cnn, {},
                   [&] { return checkpoint_sequential(cnn, strategy, images).pow(2).mean(); }),
          plain);
    }
  }
}

TEST(CheckpointIdentityTest, InstanceNormWithRunningStatistics) {
  torch::manual_seed(3);
  InstanceNorm2d norm(InstanceNorm2dOptions(4).track_running_stats(true).affine(true));
  const Tensor images = torch::randn({3, 4, 5, 5});
  expect_transparent(*norm, {},
                     [&](MaybeCheckpoint call) { return call(norm, images).pow(3).mean(); });
}

TEST(CheckpointIdentityTest, TransformerBlockWithDropoutAndMask) {
  torch::manual_seed(4);
  TransformerBlock block(32, 4, 0.1);
  const Tensor x = torch::randn({4, 12, 32}).requires_grad_();
  const Tensor mask = torch::ones({12, 12}, torch::kBool).triu(1);
  expect_transparent(*block, {x},
                     [&](MaybeCheckpoint call) { return call(block, x, mask).pow(2).mean(); });
}

TEST(CheckpointIdentityTest, LibTorchTransformerEncoderLayer) {
  torch::manual_seed(5);
  TransformerEncoderLayer layer(
      TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.1));
  const Tensor x = torch::randn({6, 3, 16}).requires_grad_();
  const Tensor padding = torch::zeros({3, 6}, torch::kBool);
  expect_transparent(*layer, {x}, [&](MaybeCheckpoint call) {
    return call([layer](const Tensor& in,
                        const Tensor& pad) mutable { return layer->forward(in, {}, pad); },
                x, padding)
        .pow(2)
        .mean();
  });
}

TEST(CheckpointIdentityTest, Lstm) {
  torch::manual_seed(6);
  LSTM lstm(LSTMOptions(10, 12).num_layers(2).dropout(0.2));
  const Tensor sequence = torch::randn({7, 3, 10}).requires_grad_();
  expect_transparent(*lstm, {sequence}, [&](MaybeCheckpoint call) {
    const auto [output, state] = call(lstm, sequence);
    return output.pow(2).mean() + std::get<0>(state).sum() + std::get<1>(state).sum();
  });
}

TEST(CheckpointIdentityTest, EmbeddingWithTiedWeights) {
  torch::manual_seed(8);
  Embedding embedding(30, 16);
  const Tensor tokens = torch::randint(30, {4, 9});
  expect_transparent(*embedding, {}, [&](MaybeCheckpoint call) {
    const Tensor x = call(embedding, tokens);
    const Tensor logits = call(
        [&](const Tensor& h) { return torch::matmul(torch::tanh(h), embedding->weight.t()); }, x);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
  });
}

TEST(CheckpointIdentityTest, ResidualNetOf300Blocks) {
  torch::manual_seed(9);
  ModuleList parameters;
  std::vector<Linear> linears;
  for (int i = 0; i < 300; ++i) {
    linears.emplace_back(8, 8);
    parameters->push_back(linears.back());
  }
  const Tensor x = torch::randn({4, 8}).requires_grad_();
  expect_transparent(*parameters, {x}, [&](MaybeCheckpoint call) {
    Tensor y = x;
    for (Linear& linear : linears) {
      y = call(
          [linear](const Tensor& in) mutable {
            return in + torch::dropout(torch::tanh(linear(in)), 0.1, true) / 10;
          },
          y);
    }
    return y.pow(2).mean();
  });
}

TEST(CheckpointIdentityTest, NestedThreeLevels) {
  torch::manual_seed(10);
  Linear a(6, 6), b(6, 6), c(6, 6);
  BatchNorm1d norm(6);
  Sequential all(a, b, c, norm);
  const Tensor x = torch::randn({5, 6}).requires_grad_();
  expect_transparent(*all, {x}, [&](MaybeCheckpoint call) {
    const auto innermost = [=](const Tensor& in) mutable {
      return torch::dropout(torch::tanh(c(norm(in))), 0.3, true);
    };
    const auto middle = [=](const Tensor& in) mutable {
      return call(innermost, torch::sigmoid(b(in))) * in;
    };
    const auto outer = [=](const Tensor& in) mutable {
      return call(middle, torch::tanh(a(in))) + call(middle, in);
    };
    return call(outer, call(outer, x)).pow(2).mean();
  });
}

TEST(CheckpointIdentityTest, NestedTwoHundredLevels) {
  torch::manual_seed(11);
  Linear linear(4, 4);
  const Tensor x = torch::randn({3, 4}).requires_grad_();
  std::function<Tensor(MaybeCheckpoint, Tensor, int)> descend = [&](MaybeCheckpoint call, Tensor in,
                                                                    int depth) {
    in = torch::tanh(linear(in));
    return depth == 0 ? in : call(descend, call, in, depth - 1);
  };
  expect_transparent(*linear, {x},
                     [&](MaybeCheckpoint call) { return descend(call, x, 200).pow(2).mean(); });
}

}  // namespace
}  // namespace headroom
