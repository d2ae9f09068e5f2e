#include "core/thread_waiting.h"

#include "core/contention.h"
#include "core/idle_team.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;

// Nanoseconds that each thread of this process was ready to run and had no core, by the thread's
// id; empty where Linux does not count them.
std::map<std::string, std::int64_t> nanoseconds_in_line() {
  std::map<std::string, std::int64_t> by_thread;
  const std::string folder = "/proc/self/task/";
  DIR* threads = opendir(folder.c_str());
  if (threads == nullptr) return by_thread;
  while (const dirent* thread = readdir(threads)) {
    if (thread->d_name[0] == '.') continue;
    std::ifstream file(folder + thread->d_name + "/schedstat");
    std::int64_t running = 0, in_line = 0;
    if (file >> running >> in_line) by_thread[thread->d_name] = in_line;
  }
  closedir(threads);
  return by_thread;
}

struct Sample {
  Clock::time_point time = Clock::now();
  std::map<std::string, std::int64_t> in_line = nanoseconds_in_line();
};

// Threads come and go: those that have ended count for nothing.
std::chrono::nanoseconds time_in_line(const Sample& before, const Sample& after) {
  std::int64_t total = 0;
  for (const auto& [thread, nanoseconds] : after.in_line) {
    const auto known = before.in_line.find(thread);
    total += nanoseconds - (known == before.in_line.end() ? 0 : known->second);
  }
  return std::chrono::nanoseconds(total);
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
          policy.should_sleep(time_in_line(before, after), after.time - before.time);
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
  if (nanoseconds_in_line().empty())
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
