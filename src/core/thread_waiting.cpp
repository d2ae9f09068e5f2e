#include "core/thread_waiting.h"

#include "core/carried_regions.h"
#include "core/contention.h"
#include "core/gathered_threads.h"
#include "core/idle_team.h"
#include "core/process_threads.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = ContentionWindow::Duration;

// Nanoseconds that a thread had a core, and that it was ready to run and had none.
struct ThreadTimes {
  std::int64_t running = 0;
  std::int64_t in_line = 0;
};

// Of each thread of this process, by its id; empty where Linux does not count them.
std::map<int, ThreadTimes> thread_times() {
  std::map<int, ThreadTimes> by_thread;
  for_each_thread([&](int thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/schedstat");
    ThreadTimes times;
    if (file >> times.running >> times.in_line) by_thread[thread] = times;
  });
  return by_thread;
}

// Of each core, the time that it had nothing to do since the system started.
std::map<int, Duration> idle_times() {
  static const double ticks_per_second = static_cast<double>(::sysconf(_SC_CLK_TCK));
  std::map<int, Duration> by_core;
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    int core = 0;
    long long user = 0, nice = 0, system = 0, idle = 0, waiting = 0;
    if (std::sscanf(line.c_str(), "cpu%d %lld %lld %lld %lld %lld", &core, &user, &nice, &system,
                    &idle, &waiting) == 6)
      by_core[core] = Duration(static_cast<double>(idle + waiting) / ticks_per_second);
  }
  return by_core;
}

struct Sample {
  Clock::time_point time = Clock::now();
  std::map<int, ThreadTimes> threads = thread_times();
  std::map<int, Duration> idle = idle_times();
};

// Threads come and go: those that have ended count for nothing.
ThreadTimes between(const Sample& before, const Sample& after) {
  ThreadTimes sum;
  for (const auto& [thread, times] : after.threads) {
    const auto found = before.threads.find(thread);
    const ThreadTimes known = found == before.threads.end() ? ThreadTimes() : found->second;
    sum.running += times.running - known.running;
    sum.in_line += times.in_line - known.in_line;
  }
  return sum;
}

Duration idle_between(const Sample& before, const Sample& after, const std::vector<int>& cores) {
  Duration sum{0};
  for (const int core : cores) {
    const auto from = before.idle.find(core), to = after.idle.find(core);
    if (from != before.idle.end() && to != after.idle.end()) sum += to->second - from->second;
  }
  return sum;
}

std::vector<int> without(const std::vector<int>& cores, const std::vector<int>& some) {
  std::vector<int> rest;
  std::set_difference(cores.begin(), cores.end(), some.begin(), some.end(),
                      std::back_inserter(rest));
  return rest;
}

// Of the time in line, what other processes are to blame for. Threads of ours may wait for each
// other: one loads data while all cores compute, or two have started on one core. Then no other
// process has our cores, and sleeping would gain nothing.
ContentionWindow measure(const Sample& before, const Sample& after,
                         const std::vector<int>& all_cores, const std::vector<int>& our_cores) {
  const auto num_all = static_cast<double>(all_cores.size());
  const std::vector<int> left = without(all_cores, our_cores);
  const ThreadTimes ours = between(before, after);
  const Duration running = std::chrono::nanoseconds(ours.running);
  const Duration in_line = std::chrono::nanoseconds(ours.in_line);
  ContentionWindow window;
  window.length = after.time - before.time;
  const Duration idle = idle_between(before, after, all_cores);
  window.cores_of_others = std::max(0.0, num_all - (running + idle) / window.length);
  const Duration not_ours = static_cast<double>(our_cores.size()) * window.length - running;
  window.lost =
      std::max(Duration{0}, std::min({in_line, not_ours, window.cores_of_others * window.length}));
  if (!left.empty())
    window.idle_share_left =
        idle_between(before, after, left) / (static_cast<double>(left.size()) * window.length);
  return window;
}

// How many cores the process had before its threads were gathered; 0: they are not.
std::atomic<int>& gathered_from() {
  static std::atomic<int> count{0};
  return count;
}

class Watch {
 public:
  explicit Watch(int num_threads)
      : process_(getpid()),
        all_cores_(allowed_cores()),
        thread_([this, num_threads] { run(num_threads); }) {}
  ~Watch() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      has_ended_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  bool is_of_this_process() const { return getpid() == process_; }

 private:
  void run(int num_threads) {
    ContentionPolicy policy(num_threads, static_cast<int>(all_cores_.size()));
    std::unique_ptr<IdleTeam> idle_team;
    std::unique_ptr<GatheredThreads> gathered;
    std::unique_ptr<CarriedRegions> carried;
    Sample before;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::milliseconds(50), [this] { return has_ended_; })) {
      Sample after;
      const ThreadConduct conduct = policy.decide(
          measure(before, after, all_cores_, gathered ? gathered->cores() : all_cores_));
      if (conduct.sleeps && !idle_team) idle_team = std::make_unique<IdleTeam>();
      if (!conduct.sleeps) idle_team.reset();
      if (conduct.num_cores == 0) {
        carried.reset();
        gathered.reset();
      } else if (!gathered) {
        gathered = std::make_unique<GatheredThreads>(some_cores(conduct.num_cores), all_cores_);
        carried = std::make_unique<CarriedRegions>(conduct.num_cores);
      }
      gathered_from() = gathered ? static_cast<int>(all_cores_.size()) : 0;
      before = std::move(after);
    }
    carried.reset();
    gathered.reset();
    gathered_from() = 0;
  }

  // Any, not the first or those that seem free: of two runs side by side both would take the same.
  // Whoever has chosen badly sees cores without work, and chooses again.
  std::vector<int> some_cores(int count) {
    std::vector<int> cores = all_cores_;
    std::shuffle(cores.begin(), cores.end(), random_);
    cores.resize(static_cast<std::size_t>(count));
    std::sort(cores.begin(), cores.end());
    return cores;
  }

  pid_t process_;
  std::vector<int> all_cores_;
  std::minstd_rand random_{std::random_device{}()};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread thread_;
};

// Ends the watch with the process. A fork has a copy of the object but not of its thread, and
// leaves it alone.
struct WatchOfProcess {
  explicit WatchOfProcess(int num_threads) : watch(std::make_unique<Watch>(num_threads)) {}
  std::unique_ptr<Watch> watch;
  ~WatchOfProcess() {
    if (!watch->is_of_this_process()) static_cast<void>(watch.release());
  }
};

// What the user or the system has decided already.
std::optional<std::string> decided_elsewhere() {
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return std::string(name) + "=" + value;
  }
  if (dlsym(RTLD_DEFAULT, "kmp_set_blocktime") != nullptr)
    return "the default of this OpenMP runtime, which is not GNU's";
  if (thread_times().empty())
    return "the OpenMP runtime's default: this system does not count the time in line for a core";
  return std::nullopt;
}

}  // namespace

void adapt_thread_waiting(int num_threads) {
  if (decided_elsewhere()) return;
  static const WatchOfProcess watch(num_threads);
}

int num_allowed_cores() {
  const int count = gathered_from();
  return count > 0 ? count : std::max(1, static_cast<int>(allowed_cores().size()));
}

std::string thread_waiting() {
  return decided_elsewhere().value_or(
      "they spin on free cores, and sleep, on fewer cores, where other work wants the same");
}

}  // namespace headroom
