#pragma once

#include <chrono>

namespace headroom {

/// How threads that compute together should behave beside other work.
struct ThreadConduct {
  bool sleeps = false;  ///< while they wait for each other; otherwise they spin
  int num_cores = 0;    ///< cores that they gather on; 0: they stay on all
};

/// What was measured in one window of time.
struct ContentionWindow {
  using Duration = std::chrono::duration<double>;

  Duration length{0};
  Duration lost{0};            ///< time that our threads were ready and had no core because other
                               ///< processes had it, summed over threads
  double cores_of_others = 0;  ///< that other processes kept busy, of those that we may use
  double idle_share_left = 0;  ///< of the time of the cores that we have left to others; 0: none
};

/// Decides from what is measured, window by window, how threads should wait, and where. Begins with
/// spinning on all cores.
/// - Threads sleep after two windows that lost much, or after half a second that lost some: every
///   system has short work of its own. While they sleep, the time that they stand in line says
///   little, because waking up is part of it; so the only way to find out is to spin for a while,
///   at intervals that double up to 16 s while the machine stays busy.
/// - Where others had half of the cores or more while our threads spun, and so competed for them,
///   threads gather on those that remain: a thread that shares its core with a stranger holds up
///   all others at the end of every loop. Then the cores that were left to others tell when those
///   have gone. What others use while our threads sleep says little: work of low priority takes
///   all that is free.
class ContentionPolicy {
 public:
  using Duration = ContentionWindow::Duration;

  ContentionPolicy(int num_threads, int num_cores)
      : num_threads_(num_threads), num_cores_(num_cores) {}

  /// What should hold from now on.
  ThreadConduct decide(const ContentionWindow& window);

 private:
  static constexpr double kBusyShare = 0.1;       // of half a second
  static constexpr double kVeryBusyShare = 0.25;  // of one window
  static constexpr double kIdleShare = 0.5;
  static constexpr Duration kShortestSleep{1.0};
  static constexpr Duration kLongestSleep{16.0};
  static constexpr Duration kReview{0.5};  // long enough for the system's clock ticks of 10 ms

  void enter(ThreadConduct conduct);
  void review();
  void forget();
  int cores_to_gather_on(double cores_of_others) const;

  int num_threads_;
  int num_cores_;
  ThreadConduct conduct_;
  bool was_very_busy_ = false;  // the window before
  Duration in_this_state_{0};
  Duration next_sleep_ = kShortestSleep;
  Duration reviewed_{0};
  Duration lost_{0};            // since the last review
  Duration used_by_others_{0};  // since then, summed over cores
  Duration idle_left_{0};
};

}  // namespace headroom
