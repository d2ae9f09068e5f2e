#include "core/idle_team.h"

#include <omp.h>

#include <atomic>

namespace headroom {

IdleTeam::IdleTeam() {
  thread_ = std::thread([this] {
    // More threads than cores, whatever the number of those that train.
    const int num_threads = omp_get_num_procs() + 1;
    std::atomic<int> num_started{0};  // a region without any work might not start a team
#pragma omp parallel num_threads(num_threads)
    ++num_started;
    set_state(State::kIdle);
    wait_for(State::kEnding);
  });
  wait_for(State::kIdle);
}

IdleTeam::~IdleTeam() {
  set_state(State::kEnding);
  thread_.join();
}

void IdleTeam::set_state(State state) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = state;
  }
  changed_.notify_all();
}

void IdleTeam::wait_for(State state) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return state_ == state; });
}

}  // namespace headroom
