// What checkpoint costs: the bookkeeping of one call, and a training step of a transformer against
// forward + forward + backward.

#include <headroom/core/runtime.h>
#include <headroom/execute/checkpoint.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "support/transformer.h"
#include "timing.h"

namespace {

using headroom::checkpoint;
using headroom::checkpoint_sequential;
using headroom::CheckpointStrategy;
using headroom::testing::TransformerBlock;
using torch::Tensor;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using headroom::benchmark::fastest;
using headroom::benchmark::median;

// The difference between a chain of small checkpointed calls and the same work done by hand
// (forward, forward again, backward).
void measure_bookkeeping() {
  constexpr int kCalls = 200;
  const Tensor x = torch::randn({16}).requires_grad_();
  const auto fn = [](const Tensor& in) { return torch::tanh(in); };
  std::vector<double> overheads, forward_overheads;
  for (int round = 0; round < 31; ++round) {
    const auto chain = [&](bool checkpointed) {
      Tensor y = x;
      for (int i = 0; i < kCalls; ++i) y = checkpointed ? checkpoint(fn, y) : fn(y);
      return y;
    };
    Tensor plain, checkpointed;
    const double forward = seconds([&] { plain = chain(false); });
    const double backward = seconds([&] { plain.backward(torch::ones_like(plain)); });
    const double our_forward = seconds([&] { checkpointed = chain(true); });
    const double our_backward = seconds([&] { checkpointed.backward(torch::ones_like(plain)); });
    if (round == 0) continue;
    forward_overheads.push_back((our_forward - forward) / kCalls);
    overheads.push_back((our_forward + our_backward - 2 * forward - backward) / kCalls);
  }
  std::printf("bookkeeping of one call: %.1f us in forward, %.1f us in all\n",
              1e6 * median(forward_overheads), 1e6 * median(overheads));
}

// Plain and each variant in turn, several times. The fastest of each counts: whatever else the
// machine does only adds time.
void measure_step() {
  constexpr int kBlocks = 12;
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int i = 0; i < kBlocks; ++i) model->push_back(TransformerBlock(128, 4, 0.1));
  const Tensor x = torch::randn({8, 128, 128});
  headroom::MemoryMeter& meter = headroom::MemoryMeter::instance();

  struct Variant {
    std::string name;
    std::function<Tensor()> forward;
  };
  const auto with = [&](const CheckpointStrategy& strategy) {
    return [&model, &x, strategy] { return checkpoint_sequential(model, strategy, x); };
  };
  const auto kept_as = [&](headroom::KeepAs format, std::function<Tensor()> inner) {
    return [format, inner] {
      const headroom::KeepAsScope scope(format);
      return inner();
    };
  };
  const auto plain = [&] { return model->forward(x); };
  const std::vector<Variant> variants = {
      {"plain", plain},
      {"every", with(CheckpointStrategy::every())},
      {"segments 3", with(CheckpointStrategy(3))},
      {"segments 3, last kept", with(CheckpointStrategy(3).checkpoint_last(false))},
      {"sqrt", with(CheckpointStrategy::sqrt())},
      {"log", with(CheckpointStrategy::log())},
      {"kept as bf16", kept_as(headroom::KeepAs::kBf16, plain)},
      {"kept on disk", kept_as(headroom::KeepAs::kDisk, plain)},
      {"every, inputs on disk",
       kept_as(headroom::KeepAs::kDisk, with(CheckpointStrategy::every()))},
  };
  std::vector<std::vector<double>> times(variants.size());
  std::vector<std::int64_t> peaks(variants.size());
  std::vector<double> ideals;
  model->forward(x).sum().backward();  // gradients are there from now on
  for (int round = 0; round < 10; ++round) {
    Tensor y;
    const double forward = seconds([&] { y = model->forward(x); });
    const double backward = seconds([&] { y.sum().backward(); });
    y = Tensor();
    ideals.push_back(2 * forward + backward);
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const std::int64_t base = meter.live_bytes();
      meter.reset_peak();
      times[i].push_back(seconds([&] { variants[i].forward().sum().backward(); }));
      peaks[i] = meter.peak_bytes() - base;
    }
  }
  const double ideal = fastest(ideals), plain_seconds = fastest(times[0]);
  std::printf(
      "\n12 transformer blocks, width 128, 8 x 128 tokens; forward + forward + backward takes %.0f "
      "ms\n",
      1e3 * ideal);
  std::printf("%-24s %10s %9s %12s %16s %16s\n", "", "peak MB", "of plain", "time/plain",
              "time/(F + F + B)", "by medians");
  for (std::size_t i = 0; i < variants.size(); ++i) {
    std::printf("%-24s %10.1f %8.0f%% %12.2f %16.2f %16.2f\n", variants[i].name.c_str(),
                static_cast<double>(peaks[i]) / 1e6,
                100.0 * static_cast<double>(peaks[i]) / static_cast<double>(peaks[0]),
                fastest(times[i]) / plain_seconds, fastest(times[i]) / ideal,
                median(times[i]) / median(ideals));
  }
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  headroom::configure_threads(0);
  headroom::MemoryMeter::instance();
  measure_bookkeeping();
  measure_step();
  return 0;
}
