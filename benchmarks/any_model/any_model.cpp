// Any model of PyTorch as a chain: against the whole module run by LibTorch, and at budgets between
// everything kept and the floor. Models are TorchScript files of images (B, 3, SIDE, SIDE), as
// export_models.py writes them. Rounds are interleaved; medians are printed.
//
//   any_model_benchmark ROUNDS BATCH SIDE MODEL.pt...

#include <headroom/core/bytes.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include "execute/profile.h"

#include "timing.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace {

using namespace headroom;

constexpr int kNumClasses = 1000;

// One way to make a step.
struct Entry {
  std::string name;
  std::function<void()> step;
  std::int64_t predicted_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::vector<double> seconds;
};

MicroBatch images(std::int64_t batch, std::int64_t side) {
  MicroBatch micro;
  micro.num_samples = micro.num_items = batch;
  micro.inputs = {torch::randn({batch, 3, side, side})};
  micro.targets = {torch::randint(0, kNumClasses, {batch})};
  return micro;
}

// So that what is measured is activations alone.
void allocate_gradients(const Chain& chain) {
  for (at::Tensor& parameter : chain.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
}

void measure(Entry& entry) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  const double begin = benchmark::now();
  entry.step();
  entry.seconds.push_back(benchmark::now() - begin);
  entry.peak_bytes = std::max(entry.peak_bytes, meter.peak_bytes() - before);
}

// The whole module, everything kept, and plans at shares of what keeping takes above the floor.
std::vector<Entry> entries_of(const Chain& chain, const MicroBatch& micro, Executor& executor) {
  std::vector<Entry> entries;
  entries.push_back({"whole module", [&] { chain.whole()->loss(micro).backward(); }, 0, 0, {}});
  const double begin = benchmark::now();
  const std::optional<ChainProfile> profile = profile_chain(chain, micro);
  const double measured = benchmark::now();
  ChainSolver solver(profile->grads_preallocated);
  const std::int64_t ample = solver.ample_budget_bytes();
  for (const double share : {1.0, 0.75, 0.5, 0.35, 0.25, 0.0}) {
    const std::int64_t budget =
        std::max(solver.smallest_budget_bytes(),
                 static_cast<std::int64_t>(share * static_cast<double>(ample)));
    const Schedule schedule = solver.schedule(budget);
    entries.push_back({share > 0 ? fmt::format("{:.0f}% of plain", 100 * share) : "floor",
                       [&executor, &micro, operations = schedule.operations] {
                         executor.accumulate(micro, operations, 1.0);
                       },
                       schedule.peak_bytes,
                       0,
                       {}});
  }
  fmt::print("  {} stages, measured in {:.1f} s, planned six times in {:.1f} s\n", chain.size(),
             measured - begin, benchmark::now() - measured);
  allocate_gradients(chain);
  return entries;
}

void run(const std::string& path, int rounds, const MicroBatch& micro) {
  seed_everything(1);
  fmt::print("{}\n", std::filesystem::path(path).stem().string());
  const Chain chain = Chain::from_script(path, LossKind::kCrossEntropy, micro);
  check_whole_model(chain, images(2, micro.inputs[0].size(2)));
  Executor executor(chain);
  std::vector<Entry> entries = entries_of(chain, micro, executor);
  for (int round = -1; round < rounds; ++round) {
    for (Entry& entry : entries) {
      measure(entry);
      if (round < 0) entry.seconds.clear();  // meets memory that was never touched
    }
  }
  const double whole = benchmark::median(entries[0].seconds);
  for (const Entry& entry : entries) {
    const double seconds = benchmark::median(entry.seconds);
    fmt::print("  {:<14} {:>8.3f} s  {:>+6.1f}%  peak {:>10}  predicted {:>10}\n", entry.name,
               seconds, 100 * (seconds / whole - 1), format_bytes(entry.peak_bytes),
               entry.predicted_bytes > 0 ? format_bytes(entry.predicted_bytes) : "-");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    fmt::print(stderr, "usage: any_model_benchmark ROUNDS BATCH SIDE MODEL.pt...\n");
    return 2;
  }
  configure_threads(0);
  const MicroBatch micro = images(std::atoll(argv[2]), std::atoll(argv[3]));
  for (int i = 4; i < argc; ++i) run(argv[i], std::atoi(argv[1]), micro);
  return 0;
}
