// Any model of PyTorch as a chain: against the whole module run by LibTorch, and at budgets between
// everything kept and the floor. FOLDER/NAME.pt and FOLDER/NAME.flags are as export_models.py
// writes them. Rounds are interleaved; the fastest of each counts, and its median is printed beside
// it.
//
//   any_model_benchmark ROUNDS BATCH FOLDER NAME[@BUDGET]...
//
// With a budget, of weights, gradients and samples as well, there is no other plan.
// Without rounds nothing is timed but held to the promises: one hash after three updates, and peaks
// that are not above the predicted ones.

#include <headroom/core/bytes.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/train/trainer.h>
#include "execute/profile.h"

#include "timing.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace headroom;

// One way to make a step.
struct Entry {
  std::string name;
  std::function<void()> step;
  std::int64_t predicted_bytes = 0;
  double predicted_seconds = 0;
  std::int64_t peak_bytes = 0;
  std::vector<double> seconds;
};

// What a model reads, from its flags.
struct Data {
  std::map<std::string, std::int64_t> sizes;  // of --model_config
  LossKind loss = LossKind::kCrossEntropy;
};

Data read_flags(const std::string& path) {
  Data data;
  std::ifstream file(path);
  for (std::string flag, value; file >> flag >> value;) {
    if (flag == "--loss") data.loss = parse_loss(value);
    if (flag != "--model_config") continue;
    std::istringstream sizes(value);
    for (std::string size; std::getline(sizes, size, ',');) {
      const std::size_t sign = size.find('=');
      data.sizes[size.substr(0, sign)] = std::stoll(size.substr(sign + 1));
    }
  }
  return data;
}

MicroBatch random_samples(const Data& data, std::int64_t batch) {
  const auto size = [&](const char* name) { return data.sizes.at(name); };
  MicroBatch micro;
  micro.num_samples = micro.num_items = batch;
  if (data.sizes.count("length") != 0) {
    const auto tokens = [&] {
      return torch::randint(0, size("vocab_size"), {batch, size("length")});
    };
    micro.num_items *= size("length");
    micro.inputs = {tokens()};
    micro.targets = {tokens()};
  } else {
    micro.inputs = {torch::randn({batch, size("channels"), size("rows"), size("columns")})};
    micro.targets = {torch::randint(0, size("classes"), {batch})};
  }
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

// The whole module, everything kept, and plans at shares of what the whole module takes.
std::vector<Entry> entries_of(const Chain& chain, const MicroBatch& micro, Executor& executor,
                              std::int64_t only_budget) {
  std::vector<Entry> entries;
  entries.push_back({"whole module", [&] { chain.whole()->loss(micro).backward(); }, 0, 0, 0, {}});
  const double begin = benchmark::now();
  const std::optional<ChainProfile> profile = profile_chain(chain, micro);
  const double measured = benchmark::now();
  ChainSolver solver(profile->grads_preallocated);
  allocate_gradients(chain);
  measure(entries[0]);
  double planning = 0;
  const auto add = [&](const std::string& name, std::int64_t budget) {
    const double before = benchmark::now();
    const Schedule schedule = solver.schedule(std::max(solver.smallest_budget_bytes(), budget));
    planning = std::max(planning, benchmark::now() - before);
    entries.push_back({name,
                       [&executor, &micro, operations = schedule.operations] {
                         executor.accumulate(micro, operations, 1.0);
                       },
                       schedule.peak_bytes,
                       static_cast<double>(schedule.time_ns) / 1e9,
                       0,
                       {}});
  };
  if (only_budget > 0) {
    add("budget", only_budget - MemoryMeter::instance().live_bytes());
  } else {
    add("everything kept", solver.ample_budget_bytes());
    for (const int percent : {75, 50, 35, 25})
      add(fmt::format("{}% of plain", percent), entries[0].peak_bytes * percent / 100);
    add("floor", 0);
  }
  fmt::print("  {} stages, measured in {:.1f} s, each budget planned in at most {:.2f} s\n",
             chain.size(), measured - begin, planning);
  return entries;
}

// Weights and buffers after three updates of one entry, which are undone.
std::string hash_of_updates(const Chain& chain, const Entry& entry) {
  constexpr int kNumUpdates = 3;
  constexpr double kLearningRate = 1e-3;
  const RandomStateScope random(RandomState::capture());
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const auto& [name, tensor] : chain.named_tensors())
    before.emplace_back(tensor, tensor.detach().clone());
  for (int i = 0; i < kNumUpdates; ++i) {
    allocate_gradients(chain);
    entry.step();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : chain.parameters())
      parameter.add_(parameter.grad(), -kLearningRate);
  }
  const std::string hash = weights_sha256(chain);
  const torch::NoGradGuard no_grad;
  for (auto& [tensor, value] : before) tensor.copy_(value);
  return hash;
}

// One line: whether all entries are the same model after some updates, and how far predictions are
// above what was measured, with the weights and gradients that are there as well.
void print_promises(const Chain& chain, const std::vector<Entry>& entries) {
  std::set<std::string> hashes;
  double least = 1e9, most = -1e9;
  const auto resident = static_cast<double>(MemoryMeter::instance().live_bytes());
  for (const Entry& entry : entries) {
    hashes.insert(hash_of_updates(chain, entry));
    if (entry.predicted_bytes == 0) continue;
    const double above = (resident + static_cast<double>(entry.predicted_bytes)) /
                             (resident + static_cast<double>(entry.peak_bytes)) -
                         1;
    least = std::min(least, above);
    most = std::max(most, above);
  }
  fmt::print(
      "  {} hash{} of {} after three updates, predicted above measured by {:.2f}% to {:.2f}%\n",
      hashes.size(), hashes.size() == 1 ? "" : "es", entries.size(), 100 * least, 100 * most);
}

void run(const std::string& name, int rounds, std::int64_t batch) {
  seed_everything(1);
  const std::size_t sign = name.find('@');
  const std::string path = name.substr(0, sign);
  const std::int64_t budget = sign == std::string::npos ? 0 : parse_bytes(name.substr(sign + 1));
  const Data data = read_flags(path + ".flags");
  const MicroBatch micro = random_samples(data, batch);
  const double begin = benchmark::now();
  const Chain chain = Chain::from_script(path + ".pt", data.loss, micro);
  fmt::print("{}\n  cut in {:.1f} s\n", std::filesystem::path(path).filename().string(),
             benchmark::now() - begin);
  check_whole_model(chain, random_samples(data, 2));
  Executor executor(chain);
  std::vector<Entry> entries = entries_of(chain, micro, executor, budget);
  for (int round = -1; round < rounds; ++round) {
    for (Entry& entry : entries) {
      measure(entry);
      if (round < 0) entry.seconds.clear();  // meets memory that was never touched
    }
  }
  if (rounds == 0) return print_promises(chain, entries);
  const double whole = benchmark::fastest(entries[0].seconds);
  const double whole_median = benchmark::median(entries[0].seconds);
  for (const Entry& entry : entries) {
    const double seconds = benchmark::fastest(entry.seconds);
    fmt::print("  {:<15} {:>8.3f} s  {:>+6.1f}%  (median {:>+6.1f}%)  peak {:>10}", entry.name,
               seconds, 100 * (seconds / whole - 1),
               100 * (benchmark::median(entry.seconds) / whole_median - 1),
               format_bytes(entry.peak_bytes));
    if (entry.predicted_bytes > 0)
      fmt::print("  predicted {:>10} {:>8.3f} s", format_bytes(entry.predicted_bytes),
                 entry.predicted_seconds);
    fmt::print("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    fmt::print(stderr, "usage: any_model_benchmark ROUNDS BATCH FOLDER NAME[@BUDGET]...\n");
    return 2;
  }
  configure_threads(0);
  for (int i = 4; i < argc; ++i) {
    run(std::string(argv[3]) + "/" + argv[i], std::atoi(argv[1]), std::atoll(argv[2]));
    std::fflush(stdout);
  }
  return 0;
}
