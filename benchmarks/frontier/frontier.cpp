// The trade between memory and time, measured: our plans at several budgets, the fixed policies,
// and PyTorch with and without checkpointing, all on the same GPT and interleaved. Prints a table
// and, given a path, draws it as an SVG.
//
//   frontier_benchmark [rounds] [picture.svg]

#include <headroom/core/bytes.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>
#include "core/output_file.h"
#include "execute/profile.h"
#include "optim/adam.h"
#include "report/json.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "gpt/pytorch_process.h"

namespace {

using namespace headroom;

constexpr std::int64_t kBatch = 8;
constexpr int kNumBudgets = 8;

struct Entry {
  std::string name;
  std::string group;  // "planned", "policy" or "PyTorch"
  std::vector<Operation> operations;
  std::unique_ptr<PyTorchProcess> pytorch;
  double predicted_seconds = 0.0;
  double predicted_bytes = 0.0;
  double peak_bytes = 0.0;
  std::vector<double> seconds;

  double median_seconds() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

class Ours {
 public:
  explicit Ours(const GptConfig& config)
      : chain(make_gpt(config)),
        executor(chain),
        optimizer(chain.parameters(), AdamWOptions(1e-4)) {
    const at::Tensor text = torch::randint(0, config.vocab_size, {kBatch, config.block_size + 1});
    micro.inputs = {text.slice(1, 0, config.block_size).contiguous()};
    micro.targets = {text.slice(1, 1).contiguous()};
    micro.num_samples = kBatch;
    micro.num_items = kBatch * config.block_size;
    optimizer.prepare_state();
  }

  double update(const std::vector<Operation>& operations) {
    const auto begin = std::chrono::steady_clock::now();
    executor.accumulate(micro, operations, 1.0 / static_cast<double>(micro.num_items));
    optimizer.step();
    for (const at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  Chain chain;
  Executor executor;
  AdamW optimizer;
  MicroBatch micro;
};

void measure(Ours& ours, std::vector<Entry>& entries, int rounds) {
  for (int round = 0; round <= rounds; ++round) {
    for (Entry& entry : entries) {
      double seconds = 0.0;
      if (entry.pytorch) {
        seconds = entry.pytorch->update();
      } else {
        MemoryMeter::instance().reset_peak();
        seconds = ours.update(entry.operations);
        entry.peak_bytes = static_cast<double>(MemoryMeter::instance().peak_bytes());
      }
      if (round > 0) entry.seconds.push_back(seconds);  // all warm up
    }
  }
  for (Entry& entry : entries) {
    if (entry.pytorch) entry.peak_bytes = entry.pytorch->finish();
  }
}

Entry planned(const std::string& name, const std::string& group, const Schedule& plan,
              std::int64_t static_bytes) {
  Entry entry;
  entry.name = name;
  entry.group = group;
  entry.operations = plan.operations;
  entry.predicted_seconds = static_cast<double>(plan.time_ns) * 1e-9;
  entry.predicted_bytes = static_cast<double>(static_bytes + plan.peak_bytes);
  return entry;
}

std::string picture(const std::vector<Entry>& entries) {
  constexpr double kWidth = 720, kHeight = 400, kLeft = 70, kBottom = 50, kTop = 20, kRight = 20;
  double most_bytes = 0, most_seconds = 0;
  for (const Entry& entry : entries) {
    most_bytes = std::max(most_bytes, entry.peak_bytes);
    most_seconds = std::max(most_seconds, entry.median_seconds());
  }
  const double x_scale = (kWidth - kLeft - kRight) / (most_bytes * 1.05),
               y_scale = (kHeight - kTop - kBottom) / (most_seconds * 1.1);
  const auto x_of = [&](double bytes) { return kLeft + bytes * x_scale; };
  const auto y_of = [&](double seconds) { return kHeight - kBottom - seconds * y_scale; };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
      "<path d=\"M{} {} V{} H{}\" fill=\"none\" stroke=\"#444\"/>\n"
      "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">peak memory, MiB</text>\n"
      "<text x=\"16\" y=\"{}\" transform=\"rotate(-90 16 {})\" text-anchor=\"middle\">seconds per "
      "update</text>\n",
      kWidth, kHeight, kLeft, kTop, kHeight - kBottom, kWidth - kRight, kWidth / 2, kHeight - 12,
      kHeight / 2, kHeight / 2);
  for (int i = 0; i <= 5; ++i) {
    const double bytes = most_bytes * i / 5, seconds = most_seconds * i / 5;
    svg += fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"middle\">{:.0f}</text>\n",
                       x_of(bytes), kHeight - kBottom + 18, bytes / (1 << 20));
    svg += fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\">{:.1f}</text>\n",
                       kLeft - 8, y_of(seconds) + 4, seconds);
  }
  std::string line;
  for (const Entry& entry : entries) {
    const double x = x_of(entry.peak_bytes), y = y_of(entry.median_seconds());
    const char* colour = entry.group == "planned"  ? "#0a7d4f"
                         : entry.group == "policy" ? "#c26a00"
                                                   : "#8a2be2";
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", x, y, colour);
    if (entry.group == "planned") {
      line += fmt::format("{:.1f},{:.1f} ", x, y);
    } else {
      svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"{}\">{}</text>\n", x - 10, y - 9,
                         colour, entry.name);
    }
  }
  svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"#0a7d4f\"/>\n", line);
  svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"#0a7d4f\">planned by Headroom</text>\n",
                     kLeft + 20, kTop + 14);
  return svg + "</svg>\n";
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  configure_threads(0);
  MemoryMeter::instance();
  seed_everything(0);
  const GptConfig config =
      gpt_config("gpt", "n_layer=6,n_head=6,n_embd=384,block_size=256,vocab_size=4096");
  Ours ours(config);
  const std::int64_t static_bytes = MemoryMeter::instance().live_bytes();
  const std::optional<ChainProfile> profile = profile_chain(ours.chain, ours.micro);
  ChainSolver solver(profile->grads_unallocated);

  std::vector<Entry> entries;
  const std::int64_t floor = solver.smallest_budget_bytes(), ample = solver.ample_budget_bytes();
  for (int i = 0; i < kNumBudgets; ++i) {
    const std::int64_t budget = floor + (ample - floor) * i / (kNumBudgets - 1);
    entries.push_back(planned(fmt::format("planned {}", format_bytes(static_bytes + budget)),
                              "planned", solver.schedule(budget), static_bytes));
  }
  for (const char* policy : {"none", "every", "segments=2", "sqrt", "log"}) {
    entries.push_back(planned(policy, "policy",
                              schedule_of_policy(profile->grads_unallocated, parse_policy(policy)),
                              static_bytes));
  }
  const auto pytorch = [&](const char* name, int checkpoint) {
    Entry entry;
    entry.name = name;
    entry.group = "PyTorch";
    entry.pytorch = std::make_unique<PyTorchProcess>(
        fmt::format("{} {} {} {} {} {} {} {}", config.n_layer, config.n_head, config.n_embd,
                    config.block_size, config.vocab_size, kBatch, at::get_num_threads(),
                    checkpoint),
        false);
    return entry;
  };
  entries.push_back(pytorch("PyTorch", 0));
  entries.push_back(pytorch("PyTorch, every block checkpointed", 1));
  measure(ours, entries, rounds);

  // In the memory that PyTorch needs with every block checkpointed, and with half of its
  // activations.
  const Entry& checkpointed = entries.back();
  const double their_static = 16.0 * static_cast<double>(num_parameters(config));
  std::vector<Entry> same;
  for (const double share : {1.0, 0.5}) {
    const double total = their_static + share * (checkpointed.peak_bytes - their_static);
    const auto budget = static_cast<std::int64_t>(total) - static_bytes;
    same.push_back(planned(fmt::format("planned in {:.0f}% of its activations", 100 * share),
                           "same", solver.schedule(std::max(budget, floor)), static_bytes));
  }
  same.push_back(pytorch("PyTorch, every block checkpointed", 1));
  measure(ours, same, rounds);

  fmt::print("{:42} {:>12} {:>12} {:>10} {:>10}\n", "", "peak MiB", "predicted", "s/update",
             "predicted");
  for (const std::vector<Entry>* list : {&entries, &same}) {
    for (const Entry& entry : *list) {
      fmt::print("{:42} {:12.1f} {:12.1f} {:10.3f} {:10.3f}\n", entry.name,
                 entry.peak_bytes / (1 << 20), entry.predicted_bytes / (1 << 20),
                 entry.median_seconds(), entry.predicted_seconds);
    }
  }
  for (std::size_t i = 0; i + 1 < same.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t r = 0; r < same[i].seconds.size(); ++r)
      ratios.push_back(same.back().seconds[r] / same[i].seconds[r]);
    std::sort(ratios.begin(), ratios.end());
    fmt::print("{}: {:.2f}x as fast as PyTorch with every block checkpointed\n", same[i].name,
               ratios[ratios.size() / 2]);
  }
  if (argc > 2) write_file_atomically(argv[2], picture(entries));
  return 0;
}
