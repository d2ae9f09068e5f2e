#include <headroom/execute/executor.h>

#include <headroom/core/error.h>

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>

#include "execute/checkpoint_support.h"

namespace headroom {
namespace {

using namespace torch::nn;  // NOLINT(google-build-using-namespace): the test reads as a list of
                            // LibTorch models
using testing::clear_gradients;
using testing::expect_identical;
using testing::expect_same_bits;
using testing::Outcome;
using testing::run_step;
using testing::TransformerBlock;
using torch::Tensor;
using torch::autograd::grad;

class KeepAsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::path(::testing::TempDir()) /
             ("headroom_keep_as_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  std::filesystem::path folder;
  TransformerBlock block{64, 4, 0.1};
  Tensor x = torch::randn({4, 32, 64}).requires_grad_();
  Outcome run(const std::function<Tensor()>& forward) { return run_step(*block, {x}, forward); }
};

TEST_F(KeepAsTest, DiskIsBitIdentical) {
  const Outcome plain = run([&] { return block->forward(x).pow(2).mean(); });
  const Outcome spilled = run([&] {
    const KeepAsScope scope(KeepAs::kDisk, folder);
    return block->forward(x).pow(2).mean();
  });
  expect_identical(spilled, plain);
}

TEST_F(KeepAsTest, DiskKeepsAlmostNothingInMemoryAndNoFileBehind) {
  MemoryMeter& meter = MemoryMeter::instance();
  const auto kept = [&](bool spilled) {
    const std::int64_t base = meter.live_bytes();
    std::unique_ptr<KeepAsScope> scope;
    if (spilled) scope = std::make_unique<KeepAsScope>(KeepAs::kDisk, folder);
    const Tensor loss = block->forward(x).pow(2).mean();
    EXPECT_TRUE(std::filesystem::is_empty(folder)) << "the file has no name";
    return meter.live_bytes() - base;
  };
  EXPECT_LT(kept(true) * 20, kept(false));
}

TEST_F(KeepAsTest, Bf16HalvesTheBytesAndStaysClose) {
  MemoryMeter& meter = MemoryMeter::instance();
  Linear a(64, 64), b(64, 64);
  const auto kept = [&](bool compressed) {
    const std::int64_t base = meter.live_bytes();
    std::unique_ptr<KeepAsScope> scope;
    if (compressed) scope = std::make_unique<KeepAsScope>(KeepAs::kBf16);
    const Tensor loss = b(torch::tanh(a(torch::tanh(x * 2)))).sum();
    return meter.live_bytes() - base;
  };
  EXPECT_LE(kept(true), kept(false) * 51 / 100);
  const Outcome plain = run([&] { return block->forward(x).pow(2).mean(); });
  const Outcome compressed = run([&] {
    const KeepAsScope scope(KeepAs::kBf16);
    return block->forward(x).pow(2).mean();
  });
  expect_same_bits(compressed.loss, plain.loss, "forward computes with the exact values");
  double largest = 0;
  for (std::size_t i = 0; i < plain.gradients.size(); ++i) {
    largest = std::max(
        largest, ((compressed.gradients[i] - plain.gradients[i]).norm() / plain.gradients[i].norm())
                     .item<double>());
  }
  std::printf("kept as bf16, a gradient differs by %.2f%% at most\n", 100 * largest);
  EXPECT_LE(largest, 0.02);
}

TEST_F(KeepAsTest, SharedTensorsAreStoredOnce) {
  Linear q(64, 64), k(64, 64), v(64, 64);
  for (const KeepAs format : {KeepAs::kBf16, KeepAs::kDisk}) {
    const KeepAsScope scope(format, folder);
    const Tensor u = x * 2;
    const Tensor y = q(u) + k(u) + v(u);
    EXPECT_EQ(scope.original_bytes(), static_cast<std::int64_t>(u.nbytes())) << "once for three";
    EXPECT_EQ(scope.stored_bytes(),
              static_cast<std::int64_t>(u.nbytes()) / (format == KeepAs::kBf16 ? 2 : 1));
  }
}

TEST_F(KeepAsTest, ParametersAndOldLeavesStayAsTheyAre) {
  Linear linear(64, 64);
  const Tensor constant = torch::randn({64, 64});
  const KeepAsScope scope(KeepAs::kDisk, folder);
  const Tensor y = linear(x) * 1.0 + torch::matmul(x, constant);
  EXPECT_EQ(scope.stored_bytes(), 0);
}

TEST_F(KeepAsTest, AChangeInPlaceOfWhatWasSavedIsAnErrorOrHarmless) {
  const Tensor constant = torch::randn({64, 64});
  Tensor loss;
  {
    const KeepAsScope scope(KeepAs::kDisk, folder);
    loss = torch::matmul(x, constant).sum();
  }
  constant.add_(1);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST_F(KeepAsTest, AroundACheckpointItActsOnTheInputs) {
  MemoryMeter& meter = MemoryMeter::instance();
  const auto chain = [&] {
    Tensor y = x * 1.0;
    for (int i = 0; i < 4; ++i) y = checkpoint(block, y);
    return y.pow(2).mean();
  };
  const Outcome plain = run(chain);
  std::int64_t kept = 0;
  const Outcome spilled = run([&] {
    const std::int64_t base = meter.live_bytes();
    const KeepAsScope scope(KeepAs::kDisk, folder);
    const Tensor loss = chain();
    kept = meter.live_bytes() - base;
    return loss;
  });
  expect_identical(spilled, plain);
  EXPECT_LT(kept, static_cast<std::int64_t>(x.nbytes()))
      << "not one of the four inputs is in memory";
}

TEST_F(KeepAsTest, InsideOfACheckpointItActsOnWhatFnSaves) {
  const std::string path = folder;
  const auto fn = [this, path](const Tensor& in) {
    const Tensor y = block->forward(in);
    const KeepAsScope scope(KeepAs::kDisk, path);
    return torch::tanh(y * 2).exp();
  };
  const Outcome plain = run([&] { return fn(x).mean(); });
  expect_identical(run([&] { return checkpoint(fn, x).mean(); }), plain);
}

TEST_F(KeepAsTest, NestedScopesAndSeveralBackwards) {
  Tensor loss;
  {
    const KeepAsScope disk(KeepAs::kDisk, folder);
    Tensor y = torch::tanh(x * 2);
    {
      const KeepAsScope half(KeepAs::kBf16);
      y = y.exp();
    }
    loss = y.sin().sum();
  }
  const Tensor once = grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
  expect_same_bits(grad({loss}, {x})[0], once, "second backward");
}

TEST_F(KeepAsTest, LiveBytesReturn) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t live = meter.live_bytes();
  for (int i = 0; i < 50; ++i) {
    {
      const KeepAsScope scope(i % 2 ? KeepAs::kBf16 : KeepAs::kDisk, folder);
      block->forward(x).sum().backward();
    }
    clear_gradients(*block);
    x.mutable_grad() = Tensor();
    ASSERT_EQ(meter.live_bytes(), live);
  }
}

TEST_F(KeepAsTest, AFolderThatCannotBeWrittenIsRefused) {
  try {
    const KeepAsScope scope(KeepAs::kDisk, folder / "missing");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("missing"), std::string::npos);
  }
}

TEST_F(KeepAsTest, AFullDiskIsAClearErrorAndLeavesNothingBehind) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t live = meter.live_bytes();
  // A limit on the size of files stands in for a full disk.
  ::rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::rlimit limit = before;
  limit.rlim_cur = 100 << 10;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::string message = "no error";
  try {
    const KeepAsScope scope(KeepAs::kDisk, folder);
    block->forward(x).sum().backward();
  } catch (const BudgetError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("cannot spill"), std::string::npos) << message;
  EXPECT_NE(message.find(folder.string()), std::string::npos) << message;
  EXPECT_EQ(meter.live_bytes(), live);
  const KeepAsScope scope(KeepAs::kDisk, folder);
  block->forward(x).sum().backward();
}

}  // namespace
}  // namespace headroom
