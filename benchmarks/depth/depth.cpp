// A residual net of a thousand blocks: activation memory and time of an update with everything
// kept, and of plans that have a fraction of that memory, interleaved.
//
//   depth_benchmark [rounds] [blocks]

#include <headroom/core/bytes.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>
#include "execute/profile.h"
#include "optim/sgd.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "timing.h"

namespace {

using namespace headroom;

struct Entry {
  std::string name;
  std::vector<Operation> operations;
  std::vector<double> seconds;
  std::int64_t activation_bytes = 0;
};

using headroom::benchmark::median;

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int blocks = argc > 2 ? std::atoi(argv[2]) : 1000;
  configure_threads(0);
  MemoryMeter& meter = MemoryMeter::instance();
  seed_everything(0);
  const ZooModel model =
      make_model("resnet", fmt::format("blocks={},width=8,rows=14,columns=14", blocks));
  constexpr std::int64_t kBatch = 4;
  const MicroBatch micro = make_synthetic_images(kBatch, 1, 14, 14, 10, 1)->load({0, 1, 2, 3});
  Executor executor(model.chain);
  SGD optimizer(model.chain.parameters(), SGDOptions(1e-3));
  // Gradients are there in any plan and are not what is saved: they stay allocated, and costs are
  // those of activations alone.
  const ChainCosts costs = profile_chain(model.chain, micro)->grads_preallocated;
  for (at::Tensor& parameter : model.chain.parameters())
    parameter.mutable_grad() = at::zeros_like(parameter);
  ChainSolver solver(costs);

  std::vector<Entry> entries;
  const Schedule everything = schedule_of_policy(costs, parse_policy("none"));
  entries.push_back({"keep everything", everything.operations, {}, 0});
  for (const double factor : {2.0, 4.0, 6.8, 10.0}) {
    const auto budget =
        static_cast<std::int64_t>(static_cast<double>(everything.peak_bytes) / factor);
    if (budget < solver.smallest_budget_bytes()) continue;
    entries.push_back(
        {fmt::format("planned for 1/{:g}", factor), solver.schedule(budget).operations, {}, 0});
  }
  entries.push_back({"sqrt", schedule_of_policy(costs, parse_policy("sqrt")).operations, {}, 0});

  for (int round = 0; round <= rounds; ++round) {
    for (Entry& entry : entries) {
      meter.reset_peak();
      const auto begin = std::chrono::steady_clock::now();
      executor.accumulate(micro, entry.operations, 1.0 / static_cast<double>(kBatch));
      optimizer.step();
      for (const at::Tensor& parameter : model.chain.parameters()) parameter.mutable_grad().zero_();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (round > 0) entry.seconds.push_back(seconds);  // all warm up
      entry.activation_bytes =
          meter.use().peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
    }
  }
  fmt::print("residual net of {} blocks, {} stages, {} samples; {} rounds interleaved, medians\n",
             blocks, model.chain.size(), kBatch, rounds);
  fmt::print("{:20} {:>16} {:>8} {:>12} {:>10}\n", "", "activations", "less", "s/update", "time");
  for (const Entry& entry : entries) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < entry.seconds.size(); ++i)
      ratios.push_back(entry.seconds[i] / entries.front().seconds[i]);
    fmt::print("{:20} {:>16} {:>7.1f}x {:>12.3f} {:>+9.1f}%\n", entry.name,
               format_bytes(entry.activation_bytes),
               static_cast<double>(entries.front().activation_bytes) /
                   static_cast<double>(entry.activation_bytes),
               median(entry.seconds), 100 * (median(ratios) - 1));
  }
  return 0;
}
