// Time, state and temporaries of one update of GPT-2 124M, for each optimizer, beside
// torch::optim::AdamW and beside a pass that moves the same 28 bytes per parameter and computes
// nothing. The contenders take turns within each round; what counts is the median of the ratios.
//
//   optimizers_benchmark [rounds] [layers]

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <headroom/core/bytes.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "timing.h"

namespace {

using headroom::MemoryMeter;

std::vector<std::vector<std::int64_t>> gpt2_shapes(int num_layers) {
  std::vector<std::vector<std::int64_t>> shapes = {{50257, 768}, {1024, 768}};
  const std::vector<std::vector<std::int64_t>> block = {{768},       {768},  {2304, 768}, {2304},
                                                        {768, 768},  {768},  {768},       {768},
                                                        {3072, 768}, {3072}, {768, 3072}, {768}};
  for (int layer = 0; layer < num_layers; ++layer)
    shapes.insert(shapes.end(), block.begin(), block.end());
  shapes.insert(shapes.end(), {{768}, {768}});
  return shapes;
}

double milliseconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

using headroom::benchmark::median;

__attribute__((target_clones("avx512f", "avx2", "default"))) void stream(std::int64_t count,
                                                                         float* p, const float* g,
                                                                         float* m, float* v) {
  for (std::int64_t i = 0; i < count; ++i) {
    p[i] += g[i];
    m[i] += g[i];
    v[i] += g[i];
  }
}

struct Contender {
  std::string name;
  std::function<void()> update;
  std::int64_t state_bytes = 0;
  std::int64_t temporary_bytes = 0;
  std::vector<double> times_ms = {};
};

std::vector<at::Tensor> zeros_for(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) result.push_back(torch::zeros(parameter.sizes()));
  return result;
}

void measure(Contender& contender) {
  auto& meter = MemoryMeter::instance();
  meter.reset_peak();
  const std::int64_t before = meter.live_bytes();
  contender.times_ms.push_back(milliseconds(contender.update));
  contender.temporary_bytes = meter.peak_bytes() - before;
}

void print(const std::vector<Contender>& contenders, double num_parameters) {
  const auto& bound = contenders.at(0);
  const auto& libtorch = contenders.at(1);
  fmt::print("{:<22} {:>9} {:>12} {:>12} {:>14} {:>14}\n", "", "ms", "x bound", "x LibTorch",
             "state B/param", "temporaries");
  for (const auto& contender : contenders) {
    std::vector<double> to_bound;
    std::vector<double> to_libtorch;
    for (std::size_t i = 0; i < contender.times_ms.size(); ++i) {
      to_bound.push_back(contender.times_ms[i] / bound.times_ms[i]);
      to_libtorch.push_back(libtorch.times_ms[i] / contender.times_ms[i]);
    }
    fmt::print("{:<22} {:>9.1f} {:>12.2f} {:>12.2f} {:>14.3f} {:>14}\n", contender.name,
               median(contender.times_ms), median(to_bound), median(to_libtorch),
               static_cast<double>(contender.state_bytes) / num_parameters,
               headroom::format_bytes(contender.temporary_bytes));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int num_rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const int num_layers = argc > 2 ? std::atoi(argv[2]) : 12;
  MemoryMeter::instance();
  headroom::configure_threads(0);
  headroom::NamedParameters named;
  std::vector<at::Tensor> parameters;
  torch::manual_seed(1);
  for (const auto& shape : gpt2_shapes(num_layers)) {
    parameters.push_back(torch::randn(shape).mul_(0.02).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(shape).mul_(1e-3);
    named.emplace_back(fmt::format("p{}", named.size()), parameters.back());
  }
  double num_parameters = 0;
  for (const auto& parameter : parameters) num_parameters += static_cast<double>(parameter.numel());

  std::vector<Contender> contenders;
  const auto m = zeros_for(parameters);
  const auto v = zeros_for(parameters);
  contenders.push_back(
      {"28 bytes, no work", [&]() {
         for (std::size_t i = 0; i < parameters.size(); ++i) {
           at::parallel_for(
               0, parameters[i].numel(), 32768, [&](std::int64_t begin, std::int64_t end) {
                 stream(end - begin, parameters[i].data_ptr<float>() + begin,
                        parameters[i].grad().data_ptr<float>() + begin,
                        m[i].data_ptr<float>() + begin, v[i].data_ptr<float>() + begin);
               });
         }
       }});
  torch::optim::AdamW libtorch(parameters, torch::optim::AdamWOptions(1e-5).weight_decay(0.1));
  contenders.push_back({"torch::optim::AdamW", [&libtorch]() { libtorch.step(); }});
  contenders.back().state_bytes = static_cast<std::int64_t>(8 * num_parameters);

  std::vector<std::unique_ptr<headroom::LeanOptimizer>> optimizers;
  for (const auto& name : headroom::optimizer_names()) {
    headroom::OptimizerConfig config;
    config.name = name;
    config.learning_rate = 1e-5;
    config.weight_decay = 0.1;
    optimizers.push_back(headroom::make_optimizer(config, named));
    optimizers.back()->prepare_state();
    contenders.push_back(
        {"headroom " + name, [optimizer = optimizers.back().get()]() { optimizer->step(); }});
    contenders.back().state_bytes = optimizers.back()->state_bytes();
  }

  for (auto& contender : contenders) contender.update();  // pages and state are in place
  for (int round = 0; round < num_rounds; ++round) {
    for (auto& contender : contenders) measure(contender);
  }
  fmt::print("{:.1f} million parameters, {} threads, {} rounds\n", num_parameters / 1e6,
             at::get_num_threads(), num_rounds);
  print(contenders, num_parameters);
  return 0;
}
