#pragma once

#include <atomic>
#include <thread>
#include <vector>

namespace headroom {

/// Cores that this process may run on, by the system's numbers, in rising order.
std::vector<int> allowed_cores();

/// While this object lives, the threads of the process run on these cores alone, but for the thread
/// that made it and those that were pinned by somebody else; and they ask the system for short
/// turns on a core (where it knows that, Linux 6.12), so that a thread which hands over its turn
/// soon has the next one. Turns end when the system looks at the core, by itself every few ms; a
/// thread of ours makes it look each 0.45 ms. Some libraries' threads spin for each other without
/// end (oneDNN's do, in gradients of convolutions), and would otherwise take the core from the one
/// that they wait for. Threads that begin meanwhile follow the thread that begins them. Where the
/// system refuses, nothing changes.
class GatheredThreads {
 public:
  GatheredThreads(std::vector<int> cores, std::vector<int> all_cores);
  ~GatheredThreads();
  GatheredThreads(const GatheredThreads&) = delete;
  GatheredThreads& operator=(const GatheredThreads&) = delete;

  const std::vector<int>& cores() const { return cores_; }

 private:
  std::vector<int> cores_;
  std::vector<int> all_cores_;
  std::atomic<bool> has_ended_{false};
  std::vector<std::thread> metronomes_;  // one for each core
};

}  // namespace headroom
