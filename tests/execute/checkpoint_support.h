#pragma once

#include <headroom/execute/checkpoint.h>
#include <headroom/memory/meter.h>

#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "support/transformer.h"

namespace headroom::testing {

/// All that a training step leaves behind.
struct Outcome {
  torch::Tensor loss;
  std::vector<torch::Tensor> gradients;  ///< of the parameters, then of the extra leaves
  std::vector<torch::Tensor> buffers;
  torch::Tensor random_after_forward, random_after_backward;
};

/// Runs forward and backward from seed 7, and puts the module's buffers back. `leaves` are inputs
/// whose gradients count too.
inline Outcome run_step(torch::nn::Module& module, std::vector<torch::Tensor> leaves,
                        const std::function<torch::Tensor()>& forward) {
  std::vector<torch::Tensor> buffers_before;
  for (const torch::Tensor& buffer : module.buffers()) buffers_before.push_back(buffer.clone());
  for (torch::Tensor& parameter : module.parameters()) leaves.insert(leaves.begin(), parameter);
  for (torch::Tensor& leaf : leaves) leaf.mutable_grad() = torch::Tensor();

  Outcome outcome;
  torch::manual_seed(7);
  outcome.loss = forward();
  outcome.random_after_forward = torch::rand({4});
  outcome.loss.backward();
  outcome.random_after_backward = torch::rand({4});
  outcome.loss = outcome.loss.detach();
  for (torch::Tensor& leaf : leaves)
    outcome.gradients.push_back(std::exchange(leaf.mutable_grad(), torch::Tensor()));
  for (const torch::Tensor& buffer : module.buffers()) outcome.buffers.push_back(buffer.clone());

  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> buffers = module.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(buffers_before[i]);
  return outcome;
}

inline void expect_same_bits(const torch::Tensor& actual, const torch::Tensor& expected,
                             const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::equal(actual, expected))
      << what << " differs by up to " << (actual - expected).abs().max().item<double>();
}

inline void expect_identical(const Outcome& actual, const Outcome& expected) {
  expect_same_bits(actual.loss, expected.loss, "loss");
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < actual.gradients.size(); ++i) {
    expect_same_bits(actual.gradients[i], expected.gradients[i], "gradient " + std::to_string(i));
  }
  ASSERT_EQ(actual.buffers.size(), expected.buffers.size());
  for (std::size_t i = 0; i < actual.buffers.size(); ++i) {
    expect_same_bits(actual.buffers[i], expected.buffers[i], "buffer " + std::to_string(i));
  }
  expect_same_bits(actual.random_after_forward, expected.random_after_forward,
                   "random stream after forward");
  expect_same_bits(actual.random_after_backward, expected.random_after_backward,
                   "random stream after backward");
}

/// Bytes live on top of what is live now, at the worst moment of `work`.
inline std::int64_t peak_of(const std::function<void()>& work) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t base = meter.live_bytes();
  meter.reset_peak();
  work();
  return meter.peak_bytes() - base;
}

}  // namespace headroom::testing
