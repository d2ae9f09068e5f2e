// Samples per second of a GPT: one rank with two threads, two ranks with one thread each, and
// PyTorch's DistributedDataParallel on two processes, in turn.
//   ranks_benchmark [rounds] [updates]
#include "core/blas_kernels.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "peer.h"
#include "timing.h"

namespace {

constexpr int kLayers = 4, kHeads = 4, kWidth = 256, kLength = 128, kVocabulary = 2048;
constexpr int kGlobalBatch = 16;

// Runs a command and reads the number that it prints.
double number_of(const std::string& command) {
  std::FILE* pipe = ::popen(command.c_str(), "r");
  double value = 0.0;
  const bool read = pipe != nullptr && std::fscanf(pipe, "%lf", &value) == 1;
  if (pipe == nullptr || ::pclose(pipe) != 0 || !read) {
    fmt::print(stderr, "this gave no number: {}\n", command);
    std::exit(1);
  }
  return value;
}

double ours(int ranks, int threads, int updates, const std::string& output) {
  const std::string train = fmt::format(
      "'{}/bin/headroom' train --model gpt --model_config "
      "n_layer={},n_head={},n_embd={},block_size={},vocab_size={} --dataset synthetic "
      "--global_batch_size {} --per_device_train_batch_size {} --max_steps {} --nproc_per_node {} "
      "--num_threads {} --disable_tqdm "
      "--report_to none --json --output_dir '{}'",
      HEADROOM_BINARY_DIR, kLayers, kHeads, kWidth, kLength, kVocabulary, kGlobalBatch,
      kGlobalBatch / 2 / ranks, updates, ranks, threads, output);
  return number_of(train +
                   " | sed -n 's/.*\"train_samples_per_second\": *\\([0-9.e+]*\\).*/\\1/p'");
}

double theirs(int ranks, int threads, int updates) {
  return number_of(fmt::format(
      "OPENBLAS_CORETYPE='{}' {} '{}/ranks/pytorch_ranks.py' {} {} {} {} "
      "{} {} {} {} 2 {}",
      headroom::blas_core(), headroom::benchmark::peer_python(), HEADROOM_BENCHMARK_DIR, ranks,
      threads, kLayers, kHeads, kWidth, kLength, kVocabulary, kGlobalBatch / 2 / ranks, updates));
}

void print(const char* what, const std::vector<double>& speeds, const std::vector<double>& base) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < speeds.size(); ++i) ratios.push_back(speeds[i] / base[i]);
  fmt::print("{:<42} {:6.2f} samples/s, {:.2f}x (from {:.2f}x to {:.2f}x)\n", what,
             headroom::benchmark::median(speeds), headroom::benchmark::median(ratios),
             *std::min_element(ratios.begin(), ratios.end()),
             *std::max_element(ratios.begin(), ratios.end()));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int updates = argc > 2 ? std::atoi(argv[2]) : 8;
  const std::string output =
      (std::filesystem::temp_directory_path() / fmt::format("headroom_ranks_{}", ::getpid()))
          .string();
  std::vector<double> one, two, pytorch;
  for (int round = 0; round < rounds; ++round) {
    one.push_back(ours(1, 2, updates, output));
    two.push_back(ours(2, 1, updates, output));
    pytorch.push_back(theirs(2, 1, updates));
  }
  std::filesystem::remove_all(output);
  headroom::benchmark::print_setting();
  fmt::print(
      "GPT of {} layers, width {}, T {}, global batch {}, two micro-batches per update on each "
      "rank\n",
      kLayers, kWidth, kLength, kGlobalBatch);
  print("one rank, two threads", one, one);
  print("two ranks, one thread each", two, one);
  const std::string version = headroom::benchmark::peer_version();
  print(fmt::format("PyTorch {} DistributedDataParallel", version).c_str(), pytorch, one);
  return 0;
}
