// What the meter costs against LibTorch's default CPU allocator: the same work under both,
// interleaved in one process.

#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>

#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "support/transformer.h"
#include "timing.h"

namespace {

using headroom::testing::clear_gradients;
using headroom::testing::SmallGpt;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using headroom::benchmark::median;

void compare(const char* name, int num_rounds, c10::Allocator* metered,
             const std::function<void()>& work) {
  std::vector<double> ours, theirs;
  for (int round = -1; round < num_rounds; ++round) {
    c10::SetCPUAllocator(metered, 1);
    const double our_seconds = seconds(work);
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 1);
    const double their_seconds = seconds(work);
    if (round < 0) continue;
    ours.push_back(our_seconds);
    theirs.push_back(their_seconds);
  }
  c10::SetCPUAllocator(metered, 1);
  std::printf("%-34s meter %9.3f ms   default %9.3f ms   ratio %.3f\n", name, 1e3 * median(ours),
              1e3 * median(theirs), median(ours) / median(theirs));
}

}  // namespace

int main() {
  headroom::configure_threads(0);
  headroom::MemoryMeter::instance();
  c10::Allocator* metered = c10::GetCPUAllocator();
  torch::manual_seed(0);

  compare("10000 tensors of 256 bytes", 50, metered, [] {
    for (int i = 0; i < 10000; ++i) torch::empty({64});
  });
  compare("1000 tensors of 1 MiB, written", 10, metered, [] {
    for (int i = 0; i < 1000; ++i) torch::ones({1 << 18});
  });

  torch::nn::Sequential mlp(torch::nn::Linear(784, 512), torch::nn::ReLU(),
                            torch::nn::Linear(512, 512), torch::nn::ReLU(),
                            torch::nn::Linear(512, 10));
  const torch::Tensor images = torch::rand({64, 784}), classes = torch::randint(10, {64});
  compare("mlp, batch 64, 10 steps", 15, metered, [&] {
    for (int i = 0; i < 10; ++i) {
      clear_gradients(*mlp);
      torch::nn::functional::cross_entropy(mlp->forward(images), classes).backward();
    }
  });

  SmallGpt gpt(2000, 256, 4, 0.1);
  const torch::Tensor tokens = torch::randint(2000, {8, 128}),
                      targets = torch::randint(2000, {8, 128});
  compare("transformer, 4 x 256, batch 8 x 128", 11, metered, [&] {
    clear_gradients(*gpt);
    gpt->loss(tokens, targets).backward();
  });
  return 0;
}
