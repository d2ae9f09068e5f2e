// Samples per second of the guide's experiment (mlp 784-512-512-10, SGD, sequential order), ours
// and PyTorch's in turn.
//   fashion_mnist_benchmark [rounds] [updates]
#include <headroom/headroom.h>

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "timing.h"

namespace {

constexpr const char* kData = "/usr/share/datasets/fashion-mnist";

struct Setting {
  int batch;
  int steps;
  double target;  // times PyTorch's samples per second
};

double ours(const Setting& setting, int updates,
            const std::shared_ptr<const headroom::Dataset>& data, const std::string& output) {
  headroom::TrainingArguments arguments;
  arguments.output_dir = output;
  arguments.optim = "sgd";
  arguments.learning_rate = 1e-3;
  arguments.lr_scheduler_type = "constant";
  arguments.max_grad_norm = 0;
  arguments.shuffle = false;
  arguments.per_device_train_batch_size = setting.batch;
  arguments.gradient_accumulation_steps = std::to_string(setting.steps);
  arguments.disable_tqdm = true;
  arguments.max_steps = updates;
  headroom::seed_everything(42);
  headroom::Trainer trainer(arguments, headroom::make_model("mlp", "").chain, data);
  return trainer.train().train_samples_per_second;
}

double theirs(const char* loop, const Setting& setting, int updates, int threads) {
  const std::string command = fmt::format(
      "/usr/bin/python3 '{}/benchmarks/fashion_mnist/fashion_mnist.py' {} {} {} {} {} {}",
      HEADROOM_SOURCE_DIR, kData, loop, setting.batch, setting.steps, updates, threads);
  std::FILE* pipe = ::popen(command.c_str(), "r");
  double samples_per_second = 0.0;
  const bool read = pipe != nullptr && std::fscanf(pipe, "%lf", &samples_per_second) == 1;
  if (pipe == nullptr || ::pclose(pipe) != 0 || !read) {
    fmt::print(stderr, "PyTorch's side did not run (Debian: python3-torch, python3-numpy)\n");
    std::exit(1);
  }
  return samples_per_second;
}

using headroom::benchmark::median;

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int updates = argc > 2 ? std::atoi(argv[2]) : 300;
  headroom::configure_threads(0);
  const int threads = headroom::runtime_info().num_threads;
  const std::shared_ptr<const headroom::Dataset> data = headroom::open_idx_images(kData, true);
  const std::string output =
      (std::filesystem::temp_directory_path() / fmt::format("headroom_benchmark_{}", ::getpid()))
          .string();

  const std::vector<std::string> loops = {"usual", "lean"};
  bool reached = true;
  for (const Setting& setting : {Setting{64, 1, 1.3}, Setting{16, 4, 2.0}}) {
    ours(setting, 20, data, output);
    std::map<std::string, std::vector<double>> speeds;
    for (int round = 0; round < rounds; ++round) {
      for (const std::string& loop : loops) {
        speeds["ours"].push_back(ours(setting, updates, data, output));
        speeds[loop].push_back(theirs(loop.c_str(), setting, updates, threads));
      }
    }
    fmt::print("{} x {}: ours {:.0f} samples/s, with {} threads\n", setting.batch, setting.steps,
               median(speeds["ours"]), threads);
    for (const std::string& loop : loops) {
      std::vector<double> ratios;
      for (int round = 0; round < rounds; ++round) {
        const std::size_t turn = 2 * static_cast<std::size_t>(round) + (loop == "usual" ? 0 : 1);
        ratios.push_back(speeds["ours"][turn] / speeds[loop][static_cast<std::size_t>(round)]);
      }
      const double ratio = median(ratios);
      fmt::print(
          "  PyTorch, {:<5} loop {:>8.0f} samples/s: ours is {:.2f}x (from {:.2f}x to {:.2f}x)\n",
          loop, median(speeds[loop]), ratio, *std::min_element(ratios.begin(), ratios.end()),
          *std::max_element(ratios.begin(), ratios.end()));
      if (loop == "usual") {
        const bool good = ratio >= setting.target;
        fmt::print("  target {:.1f}x against the usual loop: {}\n", setting.target,
                   good ? "reached" : "MISSED");
        reached = reached && good;
      }
    }
  }
  std::filesystem::remove_all(output);
  return reached ? 0 : 1;
}
