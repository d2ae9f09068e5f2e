// What other work on the same cores costs: samples per second of an mlp, a GPT and a resnet on a
// free machine and beside neighbours that this program starts, and ends. Three ways of waiting:
// ours, which adapts, and the OpenMP runtime's two; `brief` leaves the runtime's out but for
// spinning on the free machine.
//   contention_benchmark [rounds] [brief] [mlp] [gpt] [resnet]
#include <headroom/core/runtime.h>

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "timing.h"

namespace {

using headroom::benchmark::median;

constexpr unsigned kMostSeconds = 180;  // of one run, and so of its neighbours

// Processes that compute without end until this object goes, this program ends, or the time is up.
class Neighbours {
 public:
  explicit Neighbours(int count) {
    for (int i = 0; i < count; ++i) {
      const pid_t child = ::fork();
      if (child == 0) compute();
      if (child > 0) children_.push_back(child);
    }
  }
  ~Neighbours() {
    for (const pid_t child : children_) ::kill(child, SIGKILL);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

 private:
  [[noreturn]] static void compute() {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(kMostSeconds);
    for (volatile double value = 1.0;;) value = value * 1.0000001;
  }

  std::vector<pid_t> children_;
};

struct Model {
  const char* name;
  const char* flags;
};

struct Scenario {
  const char* name;
  int num_neighbours;
  int num_runs;   // at the same time
  int num_ranks;  // of each run; more than one: one thread each
};

// Runs the program and reads its samples per second; 0 where it did not end in time.
double samples_per_second(const Model& model, const Scenario& scenario,
                          const std::string& environment, const std::string& output) {
  const std::string ranks =
      scenario.num_ranks == 1
          ? std::string()
          : fmt::format("--nproc_per_node {} --num_threads 1", scenario.num_ranks);
  const std::string command = fmt::format(
      "{} timeout {} '{}/bin/headroom' train {} {} --disable_tqdm --report_to none --json "
      "--output_dir '{}' 2>/dev/null | sed -n "
      "'s/.*\"train_samples_per_second\": *\\([0-9.e+]*\\).*/\\1/p'",
      environment, kMostSeconds, HEADROOM_BINARY_DIR, model.flags, ranks, output);
  std::FILE* pipe = ::popen(command.c_str(), "r");
  double value = 0.0;
  if (pipe == nullptr || std::fscanf(pipe, "%lf", &value) != 1) value = 0.0;
  if (pipe != nullptr) ::pclose(pipe);
  return value;
}

// The slowest of the runs that the scenario has at the same time.
double run(const Model& model, const Scenario& scenario, const std::string& environment,
           const std::string& folder) {
  const Neighbours neighbours(scenario.num_neighbours);
  std::vector<std::future<double>> runs;
  for (int i = 0; i < scenario.num_runs; ++i) {
    runs.push_back(std::async(std::launch::async, [&, i] {
      return samples_per_second(model, scenario, environment, fmt::format("{}/{}", folder, i));
    }));
  }
  double slowest = runs.front().get();
  for (std::size_t i = 1; i < runs.size(); ++i) slowest = std::min(slowest, runs[i].get());
  return slowest;
}

struct Waiting {
  const char* name;
  const char* environment;
};

void measure(const Model& model, const std::vector<Scenario>& scenarios, int rounds, bool is_brief,
             const std::string& folder) {
  const std::vector<Waiting> kinds = {{"adapts", "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT"},
                                      {"spins", "env -u OMP_WAIT_POLICY GOMP_SPINCOUNT=300000"},
                                      {"sleeps", "OMP_WAIT_POLICY=passive"}};
  std::vector<std::vector<std::vector<double>>> speeds(
      scenarios.size(), std::vector<std::vector<double>>(kinds.size()));
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t s = 0; s < scenarios.size(); ++s) {
      const std::size_t num_kinds = !is_brief ? kinds.size() : s == 0 ? 2 : 1;
      for (std::size_t k = 0; k < num_kinds; ++k)
        speeds[s][k].push_back(run(model, scenarios[s], kinds[k].environment, folder));
    }
  }
  const double quiet = median(speeds[0][0]);
  for (std::size_t s = 0; s < scenarios.size(); ++s) {
    fmt::print("{:<8} {:<38}", model.name, scenarios[s].name);
    for (std::size_t k = 0; k < kinds.size() && !speeds[s][k].empty(); ++k)
      fmt::print("  {} {:8.0f}/s {:.2f}x", kinds[k].name, median(speeds[s][k]),
                 median(speeds[s][k]) / quiet);
    fmt::print("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  const int cores = headroom::runtime_info().num_cores;
  const std::string folder =
      (std::filesystem::temp_directory_path() / fmt::format("headroom_contention_{}", ::getpid()))
          .string();
  const std::vector<Model> models = {
      {"mlp",
       "--model mlp --dataset fashion-mnist --per_device_train_batch_size 64 --max_steps 1800"},
      {"gpt",
       "--model gpt --model_config n_layer=4,n_head=4,n_embd=128,block_size=128,vocab_size=2048 "
       "--dataset synthetic --per_device_train_batch_size 16 --max_steps 60"},
      {"resnet",
       "--model resnet --dataset fashion-mnist --per_device_train_batch_size 64 --max_steps 120"}};
  const std::vector<Scenario> scenarios = {
      {"free machine", 0, 1, 1},
      {"one neighbour per two cores", std::max(1, cores / 2), 1, 1},
      {"as many neighbours as cores", cores, 1, 1},
      {"two equal runs, the slower one", 0, 2, 1},
      {"two ranks of one thread", 0, 1, 2},
      {"two ranks, one neighbour per two cores", std::max(1, cores / 2), 1, 2}};
  fmt::print("{} cores, medians of {} rounds, ratios to the free machine\n", cores, rounds);
  std::vector<std::string> wanted(argv + std::min(argc, 2), argv + argc);
  const auto brief = std::find(wanted.begin(), wanted.end(), "brief");
  const bool is_brief = brief != wanted.end();
  if (is_brief) wanted.erase(brief);
  for (const Model& model : models) {
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), model.name) != wanted.end())
      measure(model, scenarios, rounds, is_brief, folder);
  }
  std::filesystem::remove_all(folder);
  return 0;
}
