#pragma once

// What one micro-batch of a step held and how long it took, operation by operation.

#include <headroom/memory/meter.h>
#include <headroom/train/run_plan.h>
#include "memory/device_clock.h"
#include "memory/spill_store.h"
#include "report/json.h"

#include <chrono>
#include <cstddef>
#include <vector>

namespace headroom {

/// Records one step, and of its micro-batches keeps the one that held most.
class Timeline {
 public:
  void start();
  /// After each operation of a micro-batch. One of another size than plan.micro_batch may have
  /// other operations, and is not kept.
  void record(std::size_t operation, bool has_planned_size);
  void finish();
  bool is_recording() const { return is_recording_; }

  /// For plan.json: bytes by owner after every operation.
  Json points() const;
  /// The same with times, as events that trace viewers show (Chrome's format). `plan` is the one
  /// that ran; `transfers` of a disk meanwhile are shown beside it.
  Json trace(const RunPlan& plan, const std::vector<TransferRecord>& transfers = {}) const;

 private:
  using Clock = DeviceClock;
  struct Point {
    std::size_t operation;
    Clock::time_point begin, end;
    MemoryUse use;
  };

  void keep_highest();

  std::vector<Point> current_, highest_;
  Clock::time_point last_;
  bool is_recording_ = false;
};

}  // namespace headroom
