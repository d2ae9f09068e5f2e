// Optimizer state that passes in pieces: the same bits as a whole update, through buffers of the
// size that is said.
#include "execute/state_stream.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cerrno>
#include <string>
#include <vector>

namespace headroom {
namespace {

class StateStream : public ::testing::TestWithParam<std::string> {
 protected:
  StateStream() : store_(std::make_shared<SpillStore>("")) {
    MemoryMeter::instance();
    seed_everything(3);
    whole_ = torch::randn({37, 29}).requires_grad_();
    streamed_ = whole_.detach().clone().requires_grad_();
    OptimizerConfig config;
    config.name = GetParam();
    config.momentum = 0.9;
    config.weight_decay = 0.1;
    config.learning_rate = 0.01;
    by_whole_ = make_optimizer(config, {{"w", whole_}});
    by_piece_ = make_optimizer(config, {{"w", streamed_}});
    by_piece_->prepare_state(streamed_, 0);
    for (const at::Tensor& tensor : by_piece_->state_tensors()) {
      const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
      c10::DataPtr mapping = SpillStore::map(store_, store_->reserve(bytes));
      std::memcpy(mapping.get(), tensor.data_ptr(), tensor.nbytes());
      tensor.storage().set_data_ptr(std::move(mapping));
    }
  }

  void step(std::int64_t piece_bytes) {
    whole_.mutable_grad() = torch::randn_like(whole_);
    streamed_.mutable_grad() = whole_.grad().clone();
    by_whole_->step_parameter(whole_, 0);
    step_streaming(store_, *by_piece_, streamed_, 0, piece_bytes);
  }

  std::shared_ptr<SpillStore> store_;
  at::Tensor whole_, streamed_;
  std::unique_ptr<LeanOptimizer> by_whole_, by_piece_;
};

TEST_P(StateStream, GivesTheBitsOfAWholeUpdate) {
  const auto all = static_cast<std::int64_t>(whole_.nbytes());
  for (const std::int64_t piece_bytes : {all, all / 2, std::int64_t{400}, std::int64_t{4}}) {
    step(piece_bytes);
    EXPECT_TRUE(torch::equal(whole_, streamed_)) << piece_bytes;
    const std::vector<at::Tensor> expected = by_whole_->state_tensors();
    const std::vector<at::Tensor> state = by_piece_->state_tensors();
    ASSERT_EQ(state.size(), expected.size());
    for (std::size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(torch::equal(state[i], expected[i])) << piece_bytes;
  }
}

TEST_P(StateStream, TakesTheBytesThatItSays) {
  constexpr std::int64_t kPieceBytes = 400;
  const auto bytes = static_cast<std::int64_t>(whole_.nbytes());
  step(kPieceBytes);
  whole_.mutable_grad() = torch::randn_like(whole_);
  streamed_.mutable_grad() = whole_.grad().clone();
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  MemoryMeter::instance().reset_peak();
  step_streaming(store_, *by_piece_, streamed_, 0, kPieceBytes);
  EXPECT_EQ(MemoryMeter::instance().peak_bytes() - live,
            state_stream_bytes(bytes, by_piece_->state_bytes(), kPieceBytes));
}

TEST_P(StateStream, AFailedTransferIsAnError) {
  const TransferFaultScope fault(
      [](TransferKind kind, const Extent&) { return kind == TransferKind::kWrite ? ENOSPC : 0; });
  EXPECT_THROW(step(400), BudgetError);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, StateStream, ::testing::Values("sgd", "adam", "adamw"));

TEST(StateStreams, OfNoStateAreAWholeUpdate) {
  OptimizerConfig config;
  config.name = "sgd";  // without momentum
  config.learning_rate = 0.5;
  at::Tensor weights = torch::zeros({100}).requires_grad_();
  weights.mutable_grad() = torch::ones({100});
  const auto optimizer = make_optimizer(config, {{"w", weights}});
  step_streaming(std::make_shared<SpillStore>(""), *optimizer, weights, 0, 40);
  EXPECT_TRUE(torch::equal(weights.detach(), torch::full({100}, -0.5)));
}

TEST(StateStreams, AreForOptimizersWhoseElementsAreIndependent) {
  EXPECT_FALSE(has_independent_elements("adafactor"));
  EXPECT_FALSE(has_independent_elements("adamw_8bit"));
  EXPECT_THROW(has_independent_elements("adamq"), ConfigError);
}

}  // namespace
}  // namespace headroom
