#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

namespace headroom {

/// While this object lives, OpenMP's parallel regions have as many parts as ever, each with its
/// number, but fewer threads carry them: a carrier runs one part after the other. Parts decide
/// about bits, and who runs them does not. Where other work has the other cores, that spares what
/// threads take to wait for each other at the end of hundreds of regions in every step.
/// - Parts may wait for each other, by barriers or by spinning. A region that has not begun all of
///   its parts after 20 ms gets a thread for each of them, and is left to OpenMP from then on.
/// - Regions of programs and libraries that use more of OpenMP than parallel regions, barriers and
///   the number of a thread (loops with dynamic schedules, single, tasks) are left to OpenMP.
/// - At most one object at a time. Has no effect where OpenMP's runtime is not GNU's.
class CarriedRegions {
 public:
  explicit CarriedRegions(int num_carriers);
  ~CarriedRegions();  ///< returns when all regions that were carried have ended
  CarriedRegions(const CarriedRegions&) = delete;
  CarriedRegions& operator=(const CarriedRegions&) = delete;

 private:
  void relieve();

  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread relief_;
};

}  // namespace headroom
