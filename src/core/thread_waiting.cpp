#include "core/thread_waiting.h"

#include "core/contention.h"
#include "core/idle_team.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;

// Nanoseconds that a thread had a core, and that it was ready to run and had none.
struct ThreadTimes {
  std::int64_t running = 0;
  std::int64_t in_line = 0;
};

// Of each thread of this process, by its id; empty where Linux does not count them.
std::map<std::string, ThreadTimes> thread_times() {
  std::map<std::string, ThreadTimes> by_thread;
  const std::string folder = "/proc/self/task/";
  DIR* threads = opendir(folder.c_str());
  if (threads == nullptr) return by_thread;
  while (const dirent* thread = readdir(threads)) {
    if (thread->d_name[0] == '.') continue;
    std::ifstream file(folder + thread->d_name + "/schedstat");
    ThreadTimes times;
    if (file >> times.running >> times.in_line) by_thread[thread->d_name] = times;
  }
  closedir(threads);
  return by_thread;
}

struct Sample {
  Clock::time_point time = Clock::now();
  std::map<std::string, ThreadTimes> threads = thread_times();
};

// The time in line that other processes are to blame for. Threads of ours may wait for each other:
// one loads data while all cores compute. Then we have all cores, and sleeping would gain nothing.
// Threads come and go: those that have ended count for nothing.
std::chrono::nanoseconds time_lost_to_others(const Sample& before, const Sample& after) {
  std::int64_t running = 0, in_line = 0;
  for (const auto& [thread, times] : after.threads) {
    const auto found = before.threads.find(thread);
    const ThreadTimes known = found == before.threads.end() ? ThreadTimes() : found->second;
    running += times.running - known.running;
    in_line += times.in_line - known.in_line;
  }
  const std::chrono::nanoseconds window = after.time - before.time;
  const std::int64_t num_cores = std::max(1U, std::thread::hardware_concurrency());
  const std::int64_t not_ours = std::max<std::int64_t>(0, num_cores * window.count() - running);
  return std::chrono::nanoseconds(std::min(in_line, not_ours));
}

class Watch {
 public:
  Watch() : process_(getpid()), thread_([this] { run(); }) {}
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
  void run() {
    ContentionPolicy policy;
    std::unique_ptr<IdleTeam> idle_team;
    Sample before;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::milliseconds(50), [this] { return has_ended_; })) {
      Sample after;
      const bool sleeps =
          policy.should_sleep(time_lost_to_others(before, after), after.time - before.time);
      if (sleeps && !idle_team) idle_team = std::make_unique<IdleTeam>();
      if (!sleeps) idle_team.reset();
      before = std::move(after);
    }
  }

  pid_t process_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread thread_;
};

// Ends the watch with the process. A fork has a copy of the object but not of its thread, and
// leaves it alone.
struct WatchOfProcess {
  std::unique_ptr<Watch> watch = std::make_unique<Watch>();
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

void adapt_thread_waiting() {
  if (decided_elsewhere()) return;
  static const WatchOfProcess watch;
}

std::string thread_waiting() {
  return decided_elsewhere().value_or(
      "they spin on free cores, and sleep where other work wants the same cores");
}

}  // namespace headroom
