#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

namespace headroom {

/// While this object lives, the process's OpenMP threads sleep almost at once when they wait. GNU's
/// runtime shortens its spinning, from 300,000 rounds to 100, while it has more threads than cores;
/// a second team, which does nothing, makes it so. The runtime compares the two in every wait, and
/// the team ends with the thread that began it: so waiting can be switched while training, which
/// the runtime's own settings cannot. Has no effect on other runtimes.
class IdleTeam {
 public:
  /// Returns when the team is there.
  IdleTeam();
  ~IdleTeam();
  IdleTeam(const IdleTeam&) = delete;
  IdleTeam& operator=(const IdleTeam&) = delete;

 private:
  enum class State { kStarting, kIdle, kEnding };
  void set_state(State state);
  void wait_for(State state);

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kStarting;
  std::thread thread_;
};

}  // namespace headroom
