#include "core/gathered_threads.h"

#include "core/process_threads.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <utility>

namespace headroom {
namespace {

constexpr std::uint64_t kShortTurn = 100'000;  // ns, the least that Linux gives
constexpr std::uint64_t kUsualTurn = 0;        // the system's own
constexpr std::chrono::microseconds kBeat{450};

cpu_set_t set_of(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

// As the system call has it. The C library declares it in some versions only, and under a name that
// the kernel's headers have as well.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};

void ask_for_turns(pid_t thread, std::uint64_t nanoseconds) {
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, thread, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.runtime = nanoseconds;
  syscall(SYS_sched_setattr, thread, &attributes, 0);
}

// Threads that may run on `from` go to `to`.
void move_threads(const std::vector<int>& from, const std::vector<int>& to, std::uint64_t turn) {
  const cpu_set_t expected = set_of(from), wanted = set_of(to);
  const pid_t this_thread = static_cast<pid_t>(syscall(SYS_gettid));
  for_each_thread([&](pid_t thread) {
    cpu_set_t now;
    if (thread == this_thread || sched_getaffinity(thread, sizeof(now), &now) != 0 ||
        !CPU_EQUAL(&now, &expected))
      return;
    if (sched_setaffinity(thread, sizeof(wanted), &wanted) == 0) ask_for_turns(thread, turn);
  });
}

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

GatheredThreads::GatheredThreads(std::vector<int> cores, std::vector<int> all_cores)
    : cores_(std::move(cores)), all_cores_(std::move(all_cores)) {
  move_threads(all_cores_, cores_, kShortTurn);
  for (const int core : cores_) {
    metronomes_.emplace_back([this, core] {
      const cpu_set_t set = set_of({core});
      if (sched_setaffinity(0, sizeof(set), &set) != 0) return;
      ask_for_turns(0, kShortTurn);
      while (!has_ended_) std::this_thread::sleep_for(kBeat);
    });
  }
}

GatheredThreads::~GatheredThreads() {
  has_ended_ = true;
  for (std::thread& metronome : metronomes_) metronome.join();
  move_threads(cores_, all_cores_, kUsualTurn);
}

}  // namespace headroom
