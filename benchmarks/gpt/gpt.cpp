// Trains GPTs and Llamas here and in PyTorch interleaved, update by update, and prints how they
// compare: tokens per second, peak memory, and the share of the matrix product's speed that reaches
// the model. Machines drift by tens of percent within a minute, so only ratios of neighbours count.
//
//   gpt_benchmark [small|gpt2|long|llama|llama-long|options|all] [updates] [MODE]
//
// PyTorch is given the matrix kernels that this program uses (an OpenBLAS that does not know the
// CPU falls back to slow ones); with MODE as_installed it runs as it comes, with alone not at all.
// With bf16, ours computes in bf16, and PyTorch runs in fp32 and under autocast: the faster counts.
// `options` measures one block of each kind for each way of keeping: bytes per token, and time
// against keeping all.

#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/ops/transformer.h>
#include "core/blas_kernels.h"
#include "model/llama.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
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

// A language model of the zoo, its batch, and how PyTorch is told the same.
struct Case {
  std::string name, script, arguments;
  std::function<Chain()> make;
  std::int64_t batch, length, vocabulary, num_layers, width, attention_width, num_parameters;
  double weights_in_products;  // all but tables that are only looked up
};

Case gpt_case(const std::string& name, const std::string& text, std::int64_t batch) {
  const GptConfig g = gpt_config("gpt", text);
  const std::int64_t all = num_parameters(g);
  return {name,
          "pytorch_gpt.py",
          fmt::format("{} {} {} {} {} {} {} 0", g.n_layer, g.n_head, g.n_embd, g.block_size,
                      g.vocab_size, batch, at::get_num_threads()),
          [g] { return make_gpt(g); },
          batch,
          g.block_size,
          g.vocab_size,
          g.n_layer,
          g.n_embd,
          g.n_embd,
          all,
          static_cast<double>(all - g.block_size * g.n_embd)};
}

Case llama_case(const std::string& name, const std::string& text, std::int64_t batch) {
  const LlamaConfig c = llama_config("llama", text);
  const std::string json = fmt::format(
      R"({{"hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "num_key_value_heads": {}, "intermediate_size": {}, "vocab_size": {}, "rms_norm_eps": {}, "rope_theta": {}, "tie_word_embeddings": true, "length": {}, "batch": {}, "threads": {}}})",
      c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
      c.intermediate_size, c.vocab_size, c.rms_norm_eps, c.rope_theta, c.max_position_embeddings,
      batch, at::get_num_threads());
  const std::int64_t all = num_parameters(c);
  return {name,
          "pytorch_llama.py",
          "'" + json + "'",
          [c] { return make_llama(c); },
          batch,
          c.max_position_embeddings,
          c.vocab_size,
          c.num_hidden_layers,
          c.hidden_size,
          c.num_attention_heads * head_size(c),
          all,
          static_cast<double>(all)};
}

std::vector<Case> cases(const std::string& which) {
  std::vector<Case> all{
      gpt_case("small", "n_layer=6,n_head=6,n_embd=384,block_size=256,vocab_size=4096", 8),
      gpt_case("gpt2", "n_layer=12,n_head=12,n_embd=768,block_size=512,vocab_size=50257", 4),
      gpt_case("long", "n_layer=12,n_head=6,n_embd=384,block_size=1024,vocab_size=4096", 2),
      llama_case("llama",
                 "num_hidden_layers=6,num_attention_heads=6,num_key_value_heads=2,hidden_size=384,"
                 "intermediate_size=1024,max_position_embeddings=256,vocab_size=4096",
                 8),
      llama_case(
          "llama-long",
          "num_hidden_layers=12,num_attention_heads=12,num_key_value_heads=4,hidden_size=768,"
          "intermediate_size=2048,max_position_embeddings=1024,vocab_size=32000",
          2),
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
  const double tokens = static_cast<double>(c.batch * c.length);
  return 6.0 * c.weights_in_products * tokens +
         6.0 * static_cast<double>(c.num_layers * c.attention_width * c.length) * tokens;
}

double sgemm_flop_per_second() {
  constexpr std::int64_t kSize = 2048;
  static const at::Tensor a = torch::randn({kSize, kSize}), b = torch::randn({kSize, kSize});
  static at::Tensor c = torch::empty({kSize, kSize});
  const double begin = now();
  at::mm_out(c, a, b);
  return 2.0 * kSize * kSize * kSize / (now() - begin);
}

ChainUpdates make_ours(const Case& c, bool in_bf16 = false) {
  ExecutorOptions options;
  if (in_bf16) options.compute_in_half = at::kBFloat16;
  const at::Tensor text = torch::randint(0, c.vocabulary, {c.batch, c.length + 1});
  return {c.make(),
          {{text.slice(1, 0, c.length).contiguous()},
           {text.slice(1, 1).contiguous()},
           c.batch,
           c.batch * c.length},
          options};
}

void run_alone(const Case& c, int updates) {
  ChainUpdates ours = make_ours(c);
  for (int i = 0; i < updates; ++i) {
    const double seconds = ours.update();
    fmt::print("{}: {:.3f} s, {:.0f} GFLOP/s; sgemm {:.0f}\n", c.name, seconds,
               flop_per_update(c) / seconds / 1e9, sgemm_flop_per_second() / 1e9);
  }
}

void compare(const Case& c, int updates, bool as_installed, bool in_bf16) {
  // Measured first, in a fresh process: the peak of a process never goes down.
  const std::int64_t resident = resident_bytes();
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  MemoryMeter::instance().reset_peak();
  ChainUpdates ours = make_ours(c, in_bf16);
  std::vector<std::unique_ptr<PyTorchProcess>> peers;  // fp32, and where it is asked for bf16
  std::vector<std::vector<double>> peer_times;
  for (const bool autocast : {false, true}) {
    if (autocast && !in_bf16) continue;
    peers.push_back(
        std::make_unique<PyTorchProcess>(c.arguments, as_installed, c.script, autocast));
    peer_times.emplace_back();
  }
  std::vector<double> our_times, sgemm;
  for (int i = 0; i <= updates; ++i) {
    const double our_time = ours.update();
    if (i > 0) our_times.push_back(our_time);  // all warm up first
    for (std::size_t peer = 0; peer < peers.size(); ++peer) {
      const double time = peers[peer]->update();
      if (i > 0) peer_times[peer].push_back(time);
    }
    const double speed = sgemm_flop_per_second();
    if (i > 0) sgemm.push_back(speed);
  }
  std::size_t fastest = 0;
  for (std::size_t peer = 1; peer < peers.size(); ++peer) {
    fmt::print("PyTorch: {:.3f} s in fp32, {:.3f} s under autocast to bf16\n",
               median(peer_times[0]), median(peer_times[peer]));
    if (median(peer_times[peer]) < median(peer_times[fastest])) fastest = peer;
  }
  const std::vector<double>& their_times = peer_times[fastest];
  std::vector<double> ratios;
  for (std::size_t i = 0; i < our_times.size(); ++i)
    ratios.push_back(their_times[i] / our_times[i]);
  static const std::string version = headroom::benchmark::peer_version();
  const double our_resident = static_cast<double>(peak_resident_bytes() - resident);
  const double our_tensors = static_cast<double>(MemoryMeter::instance().peak_bytes() - live);
  double their_resident = 0.0;
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    const double bytes = peers[peer]->finish();
    if (peer == fastest) their_resident = bytes;
  }
  const double tokens = static_cast<double>(ours.micro.num_items), mebi = 1 << 20;
  fmt::print("{} ({} layers, width {}, T {}, B {}, V {}; {:.1f}M parameters)\n", c.name,
             c.num_layers, c.width, c.length, c.batch, c.vocabulary,
             static_cast<double>(c.num_parameters) / 1e6);
  fmt::print(
      "  seconds per update, median (best): ours {:.3f} ({:.3f}), PyTorch {} {:.3f} ({:.3f})\n",
      median(our_times), *std::min_element(our_times.begin(), our_times.end()), version,
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

// One block of each kind and size, every way of keeping interleaved.
void compare_options(int updates) {
  struct BlockCase {
    std::string name;
    std::int64_t width, length, batch;
    Chain chain;
  };
  std::vector<BlockCase> blocks;
  for (const auto& [width, length, batch] :
       {std::array<std::int64_t, 3>{384, 256, 8}, std::array<std::int64_t, 3>{768, 512, 4}}) {
    blocks.push_back(
        {"gpt", width, length, batch,
         make_gpt(gpt_config("gpt", fmt::format("n_layer=1,n_head={},n_embd={},block_size={}",
                                                width / 64, width, length)))});
    blocks.push_back(
        {"llama", width, length, batch,
         make_llama(llama_config(
             "llama",
             fmt::format("num_hidden_layers=1,num_attention_heads={},num_key_value_heads={},"
                         "hidden_size={},intermediate_size={},max_position_embeddings={}",
                         width / 64, width / 192, width, width * 8 / 3, length)))});
  }
  for (const BlockCase& each : blocks) {
    const std::int64_t width = each.width, length = each.length, batch = each.batch;
    const Chain& chain = each.chain;
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
        "one block of {}, C {}, T {}, {} tokens (bytes kept per token in units of C floats; "
        "forward + "
        "backward against keeping all)\n",
        each.name, width, length, batch * length);
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
  headroom::benchmark::print_setting();
  fmt::print("PyTorch {}\n", as_installed ? "as installed" : "with the same matrix kernels");
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
      compare(c, updates, as_installed, mode == "bf16");
    }
  }
  return 0;
}
