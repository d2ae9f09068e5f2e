// A forward that keeps nothing has the bits of one that makes a graph.
#include "execute/training_kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

TEST(TrainingKernelsTest, AnLstmWithoutGradientsGivesTheBitsOfTraining) {
  torch::manual_seed(3);
  for (const bool bidirectional : {false, true}) {
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(16, 24).num_layers(2).bidirectional(bidirectional));
    const at::Tensor sequence = torch::randn({7, 3, 16});  // (T, B, C)
    const auto [expected, state] = lstm->forward(sequence);
    ASSERT_TRUE(expected.requires_grad());

    const torch::NoGradGuard no_grad;
    const TrainingKernelsScope training_kernels;
    const auto [output, last] = lstm->forward(sequence);
    EXPECT_FALSE(output.requires_grad());
    EXPECT_TRUE(torch::equal(output, expected));
    EXPECT_TRUE(torch::equal(std::get<0>(last), std::get<0>(state)));
    EXPECT_TRUE(torch::equal(std::get<1>(last), std::get<1>(state)));
  }
}

}  // namespace
}  // namespace headroom
