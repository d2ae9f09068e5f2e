// What gradient accumulation costs and saves, on a GPT-like model.
//
//   accumulation_benchmark [--executor | --picture FILE]
//
// Without a flag, time: micro-batches against one batch, and the accumulator against a loop by
// hand; --executor: the trainer's executor alone. --picture: peak bytes against the micro-batch, as
// a table and as an SVG.

#include <headroom/core/bytes.h>
#include <headroom/core/runtime.h>
#include <headroom/execute/accumulator.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include "optim/adam.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "support/transformer.h"
#include "timing.h"

namespace {

using headroom::AccumulatorOptions;
using headroom::GradientAccumulator;
using headroom::MemoryMeter;
using headroom::testing::SmallGpt;

constexpr std::int64_t kVocabulary = 2000, kWidth = 256, kNumBlocks = 4, kLength = 128;

/// One model with its optimizer and the samples of one update.
struct Training {
  explicit Training(std::int64_t global_batch)
      : model(kVocabulary, kWidth, kNumBlocks, 0.0),
        optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4)),
        tokens(torch::randint(kVocabulary, {global_batch, kLength})),
        targets(torch::randint(kVocabulary, {global_batch, kLength})) {}

  at::Tensor loss(std::int64_t first, std::int64_t size) {
    return model->loss(tokens.narrow(0, first, size), targets.narrow(0, first, size));
  }
  std::int64_t global_batch() const { return tokens.size(0); }

  SmallGpt model;
  torch::optim::AdamW optimizer;
  at::Tensor tokens, targets;  // (B, T)
};

void step_at_once(Training& training) {
  training.loss(0, training.global_batch()).backward();
  training.optimizer.step();
  headroom::testing::clear_gradients(*training.model);
}

void step_by_hand(Training& training, std::int64_t micro_batch) {
  const double num_micro_batches =
      static_cast<double>(training.global_batch()) / static_cast<double>(micro_batch);
  for (std::int64_t i = 0; i < training.global_batch(); i += micro_batch)
    (training.loss(i, micro_batch) / num_micro_batches).backward();
  training.optimizer.step();
  headroom::testing::clear_gradients(*training.model);
}

void step_accumulated(Training& training, GradientAccumulator& accumulator,
                      std::int64_t micro_batch) {
  for (std::int64_t i = 0; i < training.global_batch(); i += micro_batch) {
    accumulator.backward(training.loss(i, micro_batch), micro_batch * kLength);
  }
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using headroom::benchmark::median;

struct Way {
  std::string name;
  std::function<void()> update;
};

/// Runs the ways interleaved and prints the last one against each of the others.
void compare(const std::vector<Way>& ways, int num_rounds) {
  std::vector<std::size_t> order(ways.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<double>> times(ways.size());
  for (const Way& way : ways) way.update();
  for (int round = 0; round < num_rounds;
       ++round) {  // in every order in turn: what ran before leaves its traces in the caches
    for (const std::size_t way : order) times[way].push_back(seconds(ways[way].update));
    std::next_permutation(order.begin(), order.end());
  }
  for (std::size_t way = 0; way < ways.size(); ++way) {
    fmt::print("  {:<28} {:8.1f} ms", ways[way].name, 1e3 * median(times[way]));
    if (way + 1 < ways.size()) {
      std::vector<double> ratios;
      for (int round = 0; round < num_rounds; ++round)
        ratios.push_back(times.back()[round] / times[way][round]);
      std::sort(ratios.begin(), ratios.end());
      const auto percent = [&](std::size_t quarter) {
        return 100 * (ratios[quarter * (ratios.size() - 1) / 4] - 1);
      };
      fmt::print("   {:+.2f}% against it (quartiles {:+.2f}% to {:+.2f}%)", percent(2), percent(1),
                 percent(3));
    }
    fmt::print("\n");
  }
  std::fflush(stdout);
}

/// The accumulator around a model of plain LibTorch.
void measure_accumulator(std::int64_t global_batch, std::int64_t micro_batch, int num_rounds) {
  Training training(global_batch);
  GradientAccumulator accumulator(training.optimizer, global_batch / micro_batch);
  const std::string split = fmt::format("{} x {}", global_batch / micro_batch, micro_batch);
  fmt::print("plain GPT {} x {}, micro-batches of {} tokens\n", kNumBlocks, kWidth,
             micro_batch * kLength);
  compare({{fmt::format("one batch of {}", global_batch), [&] { step_at_once(training); }},
           {split + ", by hand", [&] { step_by_hand(training, micro_batch); }},
           {split + ", GradientAccumulator",
            [&] { step_accumulated(training, accumulator, micro_batch); }}},
          num_rounds);
}

/// The trainer's way: the chain executor, which adds each weight's gradient in place as it is made.
void measure_executor(std::int64_t global_batch, std::int64_t micro_batch, int num_rounds) {
  const headroom::GptConfig config =
      headroom::gpt_config("gpt", "n_layer=6,n_head=6,n_embd=384,block_size=256,vocab_size=4096");
  headroom::Executor executor(headroom::make_gpt(config));
  const headroom::Chain& chain = executor.chain();
  headroom::AdamW optimizer(chain.parameters(), headroom::AdamWOptions(1e-4));
  const std::vector<headroom::Operation> operations = headroom::keep_everything(chain.size());
  const std::int64_t length = config.block_size;
  const at::Tensor text = torch::randint(0, config.vocab_size, {global_batch, length + 1});
  const auto update = [&](std::int64_t size) {
    for (std::int64_t first = 0; first < global_batch; first += size) {
      headroom::MicroBatch micro;
      const at::Tensor part = text.narrow(0, first, size);
      micro.inputs = {part.slice(1, 0, length).contiguous()};
      micro.targets = {part.slice(1, 1).contiguous()};
      micro.num_samples = size;
      micro.num_items = size * length;
      executor.accumulate(micro, operations, 1.0 / static_cast<double>(global_batch * length));
    }
    optimizer.step();
    for (const at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
  };
  fmt::print("chain GPT 6 x 384, micro-batches of {} tokens\n", micro_batch * length);
  compare({{fmt::format("one batch of {}", global_batch), [&] { update(global_batch); }},
           {fmt::format("{} x {}, executor", global_batch / micro_batch, micro_batch),
            [&] { update(micro_batch); }}},
          num_rounds);
}

/// What the accumulator itself does per update, apart from the model: a model whose forward and
/// backward cost next to nothing.
void measure_wrapper(int num_rounds) {
  const at::Tensor weight = torch::randn({1 << 20}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1e-6));
  GradientAccumulator accumulator(optimizer, 4);
  std::vector<double> ours, hand;
  for (int round = -1; round < num_rounds; ++round) {
    const double by_hand = seconds([&] {
      for (int i = 0; i < 4; ++i) (weight.sum() / 4).backward();
      optimizer.step();
      weight.mutable_grad() = at::Tensor();
    });
    const double accumulated = seconds([&] {
      for (int i = 0; i < 4; ++i) accumulator.backward(weight.sum(), 1);
    });
    if (round < 0) continue;
    ours.push_back(accumulated);
    hand.push_back(by_hand);
  }
  fmt::print(
      "per update of a million weights: {:+.2f} ms for the norm, the check for NaN and the "
      "average\n",
      1e3 * (median(ours) - median(hand)));
}

struct Point {
  std::int64_t micro_batch;
  std::int64_t peak_bytes;
};

/// Peak bytes of one update, model and optimizer included.
Point measure_memory(std::int64_t global_batch, std::int64_t micro_batch) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  Training training(global_batch);
  GradientAccumulator accumulator(training.optimizer, global_batch / micro_batch);
  step_accumulated(training, accumulator, micro_batch);  // makes the optimizer's state
  meter.reset_peak();
  step_accumulated(training, accumulator, micro_batch);
  return {micro_batch, meter.peak_bytes() - before};
}

std::string draw(const std::vector<Point>& points, std::int64_t fixed_bytes,
                 std::int64_t global_batch) {
  constexpr double kWidthPx = 720, kHeightPx = 400, kLeft = 70, kTop = 60, kRight = 20,
                   kBottom = 60;
  const double plot_width = kWidthPx - kLeft - kRight, plot_height = kHeightPx - kTop - kBottom;
  const double top_bytes = 1.1 * static_cast<double>(points.back().peak_bytes);
  const auto height = [&](std::int64_t bytes) {
    return plot_height * static_cast<double>(bytes) / top_bytes;
  };
  const double slot = plot_width / static_cast<double>(points.size());
  // Greys and mid tones, readable on white and on black.
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"13\" "
      "fill=\"#808080\">\n"
      "<title>Peak memory of one update against the micro-batch size</title>\n"
      "<text x=\"{:.0f}\" y=\"22\" font-size=\"16\">Peak memory of one update of {} samples "
      "against the micro-batch</text>\n"
      "<text x=\"{:.0f}\" y=\"42\">GPT {} x {}, {} tokens, AdamW; every byte counted. The same "
      "gradients in every column.</text>\n",
      kWidthPx, kHeightPx, kLeft, global_batch, kLeft, kNumBlocks, kWidth, kLength);
  const double base = kTop + plot_height;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double x = kLeft + slot * (static_cast<double>(i) + 0.2), width = 0.6 * slot;
    const double fixed = height(fixed_bytes), total = height(points[i].peak_bytes);
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#4c8fd6\"/>\n",
        x, base - total, width, total - fixed);
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#9a9a9a\"/>\n",
        x, base - fixed, width, fixed);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:.0f} MiB</text>\n",
                       x + width / 2, base - total - 6,
                       static_cast<double>(points[i].peak_bytes) / 1048576.0);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{} x {}</text>\n",
                       x + width / 2, base + 18, global_batch / points[i].micro_batch,
                       points[i].micro_batch);
  }
  svg += fmt::format(
      "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{1:.1f}\" stroke=\"#808080\"/>\n",
      kLeft, base, kWidthPx - kRight);
  svg += fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">accumulation steps x "
      "micro-batch</text>\n",
      kLeft + plot_width / 2, base + 38);
  svg += fmt::format(
      "<rect x=\"{0:.0f}\" y=\"72\" width=\"12\" height=\"12\" fill=\"#4c8fd6\"/><text "
      "x=\"{1:.0f}\" y=\"83\">activations and "
      "temporaries</text>\n"
      "<rect x=\"{0:.0f}\" y=\"92\" width=\"12\" height=\"12\" fill=\"#9a9a9a\"/><text "
      "x=\"{1:.0f}\" y=\"103\">weights, gradients, "
      "optimizer, samples</text>\n",
      kLeft + 10, kLeft + 28);
  return svg + "</svg>\n";
}

int measure_picture(const std::string& path) {
  constexpr std::int64_t kGlobalBatch = 32;
  MemoryMeter::instance();
  std::int64_t parameter_bytes = 0;
  {
    const Training training(kGlobalBatch);
    for (const at::Tensor& parameter : training.model->parameters())
      parameter_bytes += static_cast<std::int64_t>(parameter.nbytes());
  }
  const std::int64_t fixed_bytes =
      4 * parameter_bytes +
      2 * kGlobalBatch * kLength * 8;  // weights, gradients, two moments; tokens and targets
  std::vector<Point> points;
  fmt::print(
      "| steps x micro-batch | peak | of which activations and temporaries |\n|---|---|---|\n");
  for (std::int64_t micro_batch = 1; micro_batch <= kGlobalBatch; micro_batch *= 2) {
    points.push_back(measure_memory(kGlobalBatch, micro_batch));
    fmt::print("| {} x {} | {} | {} |\n", kGlobalBatch / micro_batch, micro_batch,
               headroom::format_bytes(points.back().peak_bytes),
               headroom::format_bytes(points.back().peak_bytes - fixed_bytes));
  }
  std::ofstream file(path);
  file << draw(points, fixed_bytes, kGlobalBatch);
  if (!file.flush()) {
    fmt::print(stderr, "cannot write {}\n", path);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  headroom::configure_threads(0);
  torch::manual_seed(0);
  if (argc == 3 && std::string(argv[1]) == "--picture") return measure_picture(argv[2]);
  const bool executor_alone = argc == 2 && std::string(argv[1]) == "--executor";
  if (argc != 1 && !executor_alone) {
    fmt::print(stderr, "usage: {} [--executor | --picture FILE.svg]\n", argv[0]);
    return 2;
  }
  MemoryMeter::instance();  // its pool spares every way the page faults of large blocks
  for (const std::int64_t micro_batch : {2, 4, 8})
    measure_executor(/*global_batch=*/16, micro_batch, /*num_rounds=*/6);
  if (executor_alone) return 0;
  for (const std::int64_t micro_batch : {4, 8, 16})
    measure_accumulator(/*global_batch=*/32, micro_batch, /*num_rounds=*/12);
  measure_wrapper(/*num_rounds=*/101);
  return 0;
}
