// Samples per second of the guide's experiment (mlp 784-512-512-10, SGD, sequential order) and of
// the two convolutional networks of the zoo, ours and PyTorch's interleaved.
//   fashion_mnist_benchmark [rounds] [updates] [mlp|nin|resnet ...]
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

#include "peer.h"
#include "timing.h"

namespace {

constexpr const char* kData = "/usr/share/datasets/fashion-mnist";

struct Setting {
  const char* model;
  int batch;
  int steps;
};

struct Run {
  double samples_per_second = 0.0;
  double resident_bytes = 0.0;  // the most of the process
};

Run ours(const Setting& setting, int updates, const std::shared_ptr<const headroom::Dataset>& data,
         const std::string& output) {
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
  headroom::Trainer trainer(arguments, headroom::make_model(setting.model, "").chain, data);
  return {trainer.train().train_samples_per_second,
          static_cast<double>(headroom::peak_resident_bytes())};
}

Run theirs(const char* loop, const Setting& setting, int updates, int threads) {
  const std::string command =
      fmt::format("{} '{}/benchmarks/fashion_mnist/fashion_mnist.py' {} {} {} {} {} {} {}",
                  headroom::benchmark::peer_python(), HEADROOM_SOURCE_DIR, kData, setting.model,
                  loop, setting.batch, setting.steps, updates, threads);
  std::FILE* pipe = ::popen(command.c_str(), "r");
  Run run;
  const bool read = pipe != nullptr &&
                    std::fscanf(pipe, "%lf %lf", &run.samples_per_second, &run.resident_bytes) == 2;
  if (pipe == nullptr || ::pclose(pipe) != 0 || !read) {
    fmt::print(stderr, "PyTorch's side did not run (Debian: python3-torch, python3-numpy)\n");
    std::exit(1);
  }
  return run;
}

using headroom::benchmark::median;

constexpr double kMebi = 1 << 20;

// Ours before each of PyTorch's two loops, so that every ratio is one of neighbours.
double compare(const Setting& setting, int rounds, int updates, int threads,
               const std::shared_ptr<const headroom::Dataset>& data, const std::string& output) {
  const std::vector<std::string> loops = {"usual", "lean"};
  double resident = ours(setting, 20, data, output).resident_bytes;
  std::vector<double> our_speeds;
  std::map<std::string, std::vector<double>> speeds, ratios, bytes;
  for (int round = 0; round < rounds; ++round) {
    for (const std::string& loop : loops) {
      const Run our_run = ours(setting, updates, data, output);
      const Run their_run = theirs(loop.c_str(), setting, updates, threads);
      our_speeds.push_back(our_run.samples_per_second);
      resident = our_run.resident_bytes;
      speeds[loop].push_back(their_run.samples_per_second);
      bytes[loop].push_back(their_run.resident_bytes);
      ratios[loop].push_back(our_run.samples_per_second / their_run.samples_per_second);
    }
  }
  fmt::print("{} {} x {}: ours {:.0f} samples/s, {:.0f} MiB resident\n", setting.model,
             setting.batch, setting.steps, median(our_speeds), resident / kMebi);
  for (const std::string& loop : loops) {
    fmt::print(
        "  PyTorch, {:<5} loop {:>8.0f} samples/s, {:.0f} MiB: ours is {:.2f}x (from {:.2f}x to "
        "{:.2f}x)\n",
        loop, median(speeds[loop]), median(bytes[loop]) / kMebi, median(ratios[loop]),
        *std::min_element(ratios[loop].begin(), ratios[loop].end()),
        *std::max_element(ratios[loop].begin(), ratios[loop].end()));
  }
  std::fflush(stdout);
  return median(our_speeds);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int updates = argc > 2 ? std::atoi(argv[2]) : 300;
  std::vector<std::string> models(argv + std::min(argc, 3), argv + argc);
  if (models.empty()) models = {"mlp", "nin", "resnet"};
  headroom::configure_threads(0);
  headroom::benchmark::print_setting();
  fmt::print("PyTorch {}\n", headroom::benchmark::peer_version());
  const int threads = headroom::runtime_info().num_threads;
  const std::shared_ptr<const headroom::Dataset> data = headroom::open_idx_images(kData, true);
  const std::string output =
      (std::filesystem::temp_directory_path() / fmt::format("headroom_benchmark_{}", ::getpid()))
          .string();
  for (const std::string& model : models) {
    const double whole = compare({model.c_str(), 64, 1}, rounds, updates, threads, data, output);
    if (model != "mlp") continue;
    const double split = compare({"mlp", 16, 4}, rounds, updates, threads, data, output);
    fmt::print("  16 x 4 against 64: {:.2f}x the samples per second\n", split / whole);
  }
  std::filesystem::remove_all(output);
  return 0;
}
