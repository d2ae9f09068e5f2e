// Trains GPTs here and in PyTorch interleaved, update by update, and prints how they compare:
// tokens per second, peak memory, and the share of the matrix product's speed that reaches the
// model. Machines drift by tens of percent within a minute, so only ratios of neighbours count.
//
//   gpt_benchmark [small|gpt2|long|options|all] [updates] [as_installed|alone]
//
// PyTorch is given the matrix kernels that this program uses (an OpenBLAS that does not know the
// CPU falls back to slow ones); with as_installed it runs as it comes, with alone not at all.
// `options` measures one block for each way of keeping: bytes per token, and time against keeping
// all.

#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/ops/transformer.h>
#include "core/blas_kernels.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "chain_updates.h"
#include "gpt/pytorch_process.h"
#include "timing.h"

namespace {

using namespace headroom;

using headroom::benchmark::ChainUpdates;
using headroom::benchmark::median;
using headroom::benchmark::now;

struct Case {
  std::string name;
  GptConfig config;
  std::int64_t batch;
};

std::vector<Case> cases(const std::string& which) {
  const auto make = [](const char* text, std::int64_t batch, const char* name) {
    return Case{name, gpt_config("gpt", text), batch};
  };
  std::vector<Case> all{
      make("n_layer=6,n_head=6,n_embd=384,block_size=256,vocab_size=4096", 8, "small"),
      make("n_layer=12,n_head=12,n_embd=768,block_size=512,vocab_size=50257", 4, "gpt2"),
      make("n_layer=12,n_head=6,n_embd=384,block_size=1024,vocab_size=4096", 2, "long"),
  };
  if (which != "all")
    all.erase(
        std::remove_if(all.begin(), all.end(), [&](const Case& c) { return c.name != which; }),
        all.end());
  return all;
}

// Multiplications and additions of one update: 6 per weight of a matrix and token, and attention
// with its causal half.
double flop_per_update(const Case& c) {
  const double tokens = static_cast<double>(c.batch * c.config.block_size),
               width = static_cast<double>(c.config.n_embd);
  const double weights = static_cast<double>(num_parameters(c.config)) -
                         static_cast<double>(c.config.block_size) * width;
  return 6.0 * weights * tokens + 6.0 * static_cast<double>(c.config.n_layer) * width *
                                      static_cast<double>(c.config.block_size) * tokens;
}

double sgemm_flop_per_second() {
  constexpr std::int64_t kSize = 2048;
  static const at::Tensor a = torch::randn({kSize, kSize}), b = torch::randn({kSize, kSize});
  static at::Tensor c = torch::empty({kSize, kSize});
  const double begin = now();
  at::mm_out(c, a, b);
  return 2.0 * kSize * kSize * kSize / (now() - begin);
}

std::string pytorch_arguments(const Case& c) {
  const GptConfig& g = c.config;
  return fmt::format("{} {} {} {} {} {} {} 0", g.n_layer, g.n_head, g.n_embd, g.block_size,
                     g.vocab_size, c.batch, at::get_num_threads());
}

ChainUpdates make_ours(const Case& c) {
  const std::int64_t length = c.config.block_size;
  const at::Tensor text = torch::randint(0, c.config.vocab_size, {c.batch, length + 1});
  return {make_gpt(c.config),
          {{text.slice(1, 0, length).contiguous()},
           {text.slice(1, 1).contiguous()},
           c.batch,
           c.batch * length}};
}

void run_alone(const Case& c, int updates) {
  ChainUpdates ours = make_ours(c);
  for (int i = 0; i < updates; ++i) {
    const double seconds = ours.update();
    fmt::print("{}: {:.3f} s, {:.0f} GFLOP/s; sgemm {:.0f}\n", c.name, seconds,
               flop_per_update(c) / seconds / 1e9, sgemm_flop_per_second() / 1e9);
  }
}

void compare(const Case& c, int updates, bool as_installed) {
  // Measured first, in a fresh process: the peak of a process never goes down.
  const std::int64_t resident = resident_bytes();
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  MemoryMeter::instance().reset_peak();
  ChainUpdates ours = make_ours(c);
  PyTorchProcess theirs(pytorch_arguments(c), as_installed);
  std::vector<double> our_times, their_times, ratios, sgemm;
  for (int i = 0; i <= updates; ++i) {
    const double our_time = ours.update(), their_time = theirs.update();
    const double speed = sgemm_flop_per_second();
    if (i == 0) continue;  // both warm up
    our_times.push_back(our_time);
    their_times.push_back(their_time);
    ratios.push_back(their_time / our_time);
    sgemm.push_back(speed);
  }
  const double our_resident = static_cast<double>(peak_resident_bytes() - resident);
  const double our_tensors = static_cast<double>(MemoryMeter::instance().peak_bytes() - live);
  const double their_resident = theirs.finish();
  const double tokens = static_cast<double>(ours.micro.num_items), mebi = 1 << 20;
  fmt::print("{} ({} layers, width {}, T {}, B {}, V {}; {:.1f}M parameters)\n", c.name,
             c.config.n_layer, c.config.n_embd, c.config.block_size, c.batch, c.config.vocab_size,
             static_cast<double>(num_parameters(c.config)) / 1e6);
  fmt::print(
      "  seconds per update, median (best): ours {:.3f} ({:.3f}), PyTorch {} {:.3f} ({:.3f})\n",
      median(our_times), *std::min_element(our_times.begin(), our_times.end()), TORCH_VERSION,
      median(their_times), *std::min_element(their_times.begin(), their_times.end()));
  fmt::print("  tokens per second: ours {:.0f}, PyTorch {:.0f}: {:.2f}x (median of neighbours)\n",
             tokens / median(our_times), tokens / median(their_times), median(ratios));
  fmt::print(
      "  peak resident above the start: ours {:.0f} MiB, PyTorch {:.0f} MiB: {:.0f}%; our tensors "
      "{:.0f} MiB: {:.0f}%\n",
      our_resident / mebi, their_resident / mebi, 100 * our_resident / their_resident,
      our_tensors / mebi, 100 * our_tensors / their_resident);
  fmt::print("  model GFLOP/s {:.0f} of sgemm {:.0f} (both medians): {:.0f}%\n",
             flop_per_update(c) / median(our_times) / 1e9, median(sgemm) / 1e9,
             100 * flop_per_update(c) / median(our_times) / median(sgemm));
  std::fflush(stdout);
}

// One block of each size, every way of keeping interleaved.
void compare_options(int updates) {
  for (const auto& [width, length, batch] :
       {std::array<std::int64_t, 3>{384, 256, 8}, std::array<std::int64_t, 3>{768, 512, 4}}) {
    const Chain chain =
        make_gpt(gpt_config("gpt", fmt::format("n_layer=1,n_head={},n_embd={},block_size={}",
                                               width / 64, width, length)));
    Stage& block = chain.stage(1);
    const at::Tensor x = torch::randn({batch, length, width}).requires_grad_(true),
                     gradient = torch::randn({batch, length, width}) * 1e-3;
    const std::size_t num_options = block.options().size();
    std::vector<std::vector<double>> times(num_options + 1);
    std::vector<double> kept(num_options + 1);
    const double tokens = static_cast<double>(batch * length);
    const auto clear = [&] {
      x.mutable_grad() = at::Tensor();
      for (const at::Tensor& p : chain.parameters()) p.mutable_grad() = at::Tensor();
    };
    for (int i = 0; i <= updates; ++i) {
      for (std::size_t option = 0; option <= num_options; ++option) {
        clear();
        const double begin = now();
        const std::int64_t live = MemoryMeter::instance().live_bytes();
        at::Tensor y;
        if (option == num_options) {  // the whole block again
          const torch::NoGradGuard no_grad;
          y = block.forward({x}, {}, 0).at(0);
          kept[option] = static_cast<double>(MemoryMeter::instance().live_bytes() - live);
        }
        y = block.forward({x}, {}, option < num_options ? static_cast<int>(option) : 0).at(0);
        if (option < num_options)
          kept[option] = static_cast<double>(MemoryMeter::instance().live_bytes() - live);
        y.backward(gradient);
        if (i > 0) times[option].push_back(now() - begin);
      }
    }
    fmt::print(
        "one block, C {}, T {}, {} tokens (bytes kept per token in units of C floats; forward + "
        "backward against keeping all)\n",
        width, length, batch * length);
    for (std::size_t option = 0; option <= num_options; ++option) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < times[option].size(); ++i)
        ratios.push_back(times[option][i] / times[0][i]);
      fmt::print("  {:20} {:6.2f} C  {:6.0f} bytes  {:+5.1f}%\n",
                 option < num_options ? block.options()[option] : "whole block",
                 kept[option] / tokens / static_cast<double>(width) / 4, kept[option] / tokens,
                 100 * (median(ratios) - 1));
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "small";
  const int updates = argc > 2 ? std::atoi(argv[2]) : 5;
  const std::string mode = argc > 3 ? argv[3] : "";
  const bool as_installed = mode == "as_installed";
  configure_threads(0);
  MemoryMeter::instance();
  const RuntimeInfo info = runtime_info();
  fmt::print("{}, LibTorch {}, {} threads; PyTorch {}\n", info.blas, info.libtorch_version,
             info.num_threads, as_installed ? "as installed" : "with the same matrix kernels");
  torch::manual_seed(0);
  sgemm_flop_per_second();
  if (which == "options") {
    compare_options(updates);
    return 0;
  }
  for (const Case& c : cases(which)) {
    if (mode == "alone") {
      run_alone(c, updates);
    } else {
      compare(c, updates, as_installed);
    }
  }
  return 0;
}
