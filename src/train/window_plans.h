#pragma once

#include <headroom/core/micro_batch.h>
#include <headroom/train/run_plan.h>

#include "train/agreement.h"
#include "train/windows.h"

namespace headroom {

/// Which plan a window is trained with. Collective but for plan() and serves().
class WindowPlans {
 public:
  virtual ~WindowPlans() = default;

  /// Takes the plan for a window of this size. Throws BudgetError when nothing fits.
  virtual void begin_window(const Window& window) = 0;
  /// The plan in use.
  virtual const RunPlan& plan() const = 0;
  /// False when the window that this micro-batch belongs to needs another plan. To be asked before
  /// the micro-batch runs; `is_first` of its window on this rank.
  virtual bool serves(const MicroBatch& micro, bool is_first) = 0;
  /// The largest shapes of the window so far, from all attempts at it.
  virtual const Shapes& window_shapes() const = 0;
  /// Takes another plan for the window in progress: one that covers the agreed shapes, or, after
  /// kOutOfMemory, one that fits the agreed cap. Throws BudgetError when nothing fits.
  virtual void replace(const ShareReport& agreed, const Window& window) = 0;
};

}  // namespace headroom
