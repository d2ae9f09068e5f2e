// What keeping activations in half precision gives and costs. The same GPT with the same stage
// option and plan (everything is kept, and the same tensors) in fp32, bf16 and fp16 interleaved:
// bytes, time, and the error of the gradients; then a smaller one trained on a text in each. Last,
// what products in bf16 would cost on this CPU, which decides between keeping and computing in half
// precision.
//
//   precision_benchmark [text file] [rounds]

#include <headroom/core/bytes.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokens.h>
#include <headroom/execute/autocast.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/optim/optimizer.h>
#include "core/blas_kernels.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "timing.h"

namespace {

using namespace headroom;

using Half = std::optional<at::ScalarType>;

struct Variant {
  const char* name;
  Half half;
};
const Variant kVariants[] = {{"fp32", std::nullopt}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};

using headroom::benchmark::median;
using headroom::benchmark::now;

std::int64_t live_activations() {
  return MemoryMeter::instance().use().live_by_owner[static_cast<std::size_t>(Owner::kActivations)];
}

// `kept_bytes`, when given, gets the activations that are there when forward is done.
Executor make_executor(const Chain& chain, Half half, std::int64_t* kept_bytes = nullptr) {
  ExecutorOptions options;
  options.keep_in_half = half;
  options.on_operation = [kept_bytes, last = chain.size() - 1](std::size_t operation) {
    if (kept_bytes != nullptr && operation == last) *kept_bytes = live_activations();
  };
  return Executor(chain, options);
}

// Everything is kept by the first option that half precision uses, from which it counts; in fp32
// too: then the same tensors are kept.
std::vector<Operation> same_operations(const Chain& chain, Half half) {
  std::vector<Operation> operations = keep_everything(chain.size());
  for (Operation& operation : operations) {
    if (operation.kind == OperationKind::kForwardKeep && !half) {
      operation.option = chain.stage(static_cast<std::size_t>(operation.stage)).half_option();
    }
  }
  return operations;
}

struct Measured {
  std::vector<double> seconds;
  std::int64_t kept_bytes = 0;        // of activations, between forward and backward
  std::int64_t activation_bytes = 0;  // at their peak
  std::vector<at::Tensor> gradients;
};

void clear_gradients(const Chain& chain) {
  for (at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
}

void print_gradient_error(const Measured& half, const Measured& full, const char* name) {
  std::vector<double> errors;
  for (std::size_t i = 0; i < full.gradients.size(); ++i) {
    errors.push_back(
        ((half.gradients[i] - full.gradients[i]).norm() / full.gradients[i].norm()).item<double>());
  }
  fmt::print("  {}: gradient error (relative, by parameter): median {:.3f}%, largest {:.3f}%\n",
             name, 100 * median(errors), 100 * *std::max_element(errors.begin(), errors.end()));
}

void measure_step(int num_layers, std::int64_t batch, int num_rounds) {
  const GptConfig config = gpt_config(
      "gpt",
      fmt::format("n_layer={},n_head=6,n_embd=384,block_size=256,vocab_size=4096", num_layers));
  seed_everything(1);
  const Chain chain = make_gpt(config);
  std::vector<std::int64_t> indices(static_cast<std::size_t>(batch));
  for (std::int64_t i = 0; i < batch; ++i) indices[static_cast<std::size_t>(i)] = i;
  const MicroBatch micro =
      make_synthetic_tokens(batch, config.block_size, config.vocab_size, 2)->load(indices);
  const double scale = 1.0 / static_cast<double>(batch * config.block_size);
  MemoryMeter& meter = MemoryMeter::instance();
  Measured measured[3];
  for (int round = -1; round < num_rounds; ++round) {
    for (std::size_t v = 0; v < 3; ++v) {
      Executor executor = make_executor(chain, kVariants[v].half, &measured[v].kept_bytes);
      const std::vector<Operation> operations = same_operations(chain, kVariants[v].half);
      if (round < 0) {
        clear_gradients(chain);
        executor.accumulate(micro, operations, scale);
        for (const at::Tensor& parameter : chain.parameters())
          measured[v].gradients.push_back(parameter.grad().clone());
        continue;  // gradients are there from now on, as in a window
      }
      meter.reset_peak();
      const double start = now();
      executor.accumulate(micro, operations, scale);
      measured[v].seconds.push_back(now() - start);
      measured[v].activation_bytes =
          meter.use().peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
    }
  }
  clear_gradients(chain);
  fmt::print(
      "GPT of {} layers, width 384, {} x 256 tokens, vocabulary 4096; forward and backward, "
      "everything kept, {} rounds interleaved\n",
      num_layers, batch, num_rounds);
  fmt::print("{:8} {:>12} {:>7} {:>12} {:>7} {:>11}  {}\n", "kept in", "kept", "cut", "peak", "cut",
             "time/fp32", "middle half of the rounds");
  const auto cut = [](std::int64_t bytes, std::int64_t full) {
    return 100.0 - 100.0 * static_cast<double>(bytes) / static_cast<double>(full);
  };
  for (std::size_t v = 0; v < 3; ++v) {
    std::vector<double> ratios;
    for (std::size_t round = 0; round < measured[v].seconds.size(); ++round) {
      ratios.push_back(measured[v].seconds[round] / measured[0].seconds[round]);
    }
    std::sort(ratios.begin(), ratios.end());
    fmt::print("{:8} {:>12} {:>6.1f}% {:>12} {:>6.1f}% {:>11.3f}  {:.3f} .. {:.3f}\n",
               kVariants[v].name, format_bytes(measured[v].kept_bytes),
               cut(measured[v].kept_bytes, measured[0].kept_bytes),
               format_bytes(measured[v].activation_bytes),
               cut(measured[v].activation_bytes, measured[0].activation_bytes), median(ratios),
               ratios[ratios.size() / 4], ratios[ratios.size() * 3 / 4]);
  }
  for (std::size_t v = 1; v < 3; ++v)
    print_gradient_error(measured[v], measured[0], kVariants[v].name);
}

// The mean loss of the last 50 of 300 updates.
double train(const Dataset& crops, Half half) {
  constexpr int kUpdates = 300, kLast = 50;
  constexpr std::int64_t batch = 8;
  const GptConfig config =
      gpt_config("gpt", "n_layer=4,n_head=4,n_embd=128,block_size=128,vocab_size=256");
  seed_everything(3);
  const Chain chain = make_gpt(config);
  OptimizerConfig optimizer_config;
  optimizer_config.learning_rate = 1e-3;
  optimizer_config.weight_decay = 0.1;
  const auto optimizer = make_optimizer(optimizer_config, chain.named_parameters());
  Executor executor = make_executor(chain, half);
  const std::vector<Operation> operations = same_operations(chain, half);
  double sum = 0.0;
  for (int update = 0; update < kUpdates; ++update) {
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < batch; ++i) indices.push_back((update * batch + i) % crops.size());
    const MicroBatch micro = crops.load(indices);
    const auto num_items = static_cast<double>(micro.num_items);
    const double loss =
        executor.accumulate(micro, operations, 1.0 / num_items).loss_sum / num_items;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : chain.parameters()) gradients.push_back(parameter.grad());
    clip_global_norm(gradients, 1.0);
    optimizer->step();
    clear_gradients(chain);
    if (update >= kUpdates - kLast) sum += loss / kLast;
  }
  return sum;
}

void compare_training(const std::string& path) {
  const auto crops = make_random_crops(open_text_file(path), 128, 256, 300 * 8, 4);
  fmt::print("\nGPT of 4 layers, width 128, 300 updates of 8 x 128 bytes of {}\n", path);
  double full = 0.0;
  for (const Variant& variant : kVariants) {
    const double loss = train(*crops, variant.half);
    if (!variant.half) full = loss;
    fmt::print("  {}: loss {:.4f} ({:+.2f}%)\n", variant.name, loss, 100 * (loss / full - 1));
  }
}

// Only where it is safe: see choose_half_precision.
void compare_products() {
  fmt::print("\n{}\n", choose_half_precision(torch::kCPU, torch::kBFloat16).reason);
  const HalfInstructions half = half_instructions();
  if (!half.avx512_bf16 || std::getenv("ONEDNN_MAX_CPU_ISA") == nullptr) return;
  fmt::print(
      "products (rows x in x out), time in bf16 over time in fp32 ({} kernels), medians "
      "interleaved\n",
      blas_core());
  const std::int64_t sizes[][3] = {{2048, 384, 1152},
                                   {2048, 384, 1536},
                                   {2048, 1536, 384},
                                   {2048, 384, 4096},
                                   {2048, 768, 3072}};
  const auto seconds = [](const at::Tensor& x, const at::Tensor& weight) {
    const double start = now();
    at::linear(x, weight);
    return now() - start;
  };
  for (const auto& [rows, in, out] : sizes) {
    const at::Tensor x = torch::randn({rows, in}), weight = torch::randn({out, in});
    const at::Tensor x_half = x.to(torch::kBFloat16), weight_half = weight.to(torch::kBFloat16);
    std::vector<double> ratios, with_casts;
    for (int round = 0; round < 7; ++round) {
      const double full = seconds(x, weight);
      ratios.push_back(seconds(x_half, weight_half) / full);
      const double start = now();
      at::linear(x.to(torch::kBFloat16), weight.to(torch::kBFloat16));
      with_casts.push_back((now() - start) / full);
    }
    fmt::print("  {:4} x {:4} x {:4}: {:.2f}; {:.2f} with the casts of autocast\n", rows, in, out,
               median(ratios), median(with_casts));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  configure_threads(0);
  const int num_rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  measure_step(/*num_layers=*/6, /*batch=*/24, num_rounds);
  measure_step(/*num_layers=*/12, /*batch=*/12, num_rounds);
  compare_training(argc > 1 ? argv[1] : "/usr/share/common-licenses/GPL-3");
  compare_products();
  return 0;
}
