#pragma once

// Plans for models whose weights, gradients and optimizer state do not fit: what is paged, the
// split and the schedule together.

#include <headroom/plan/paging.h>
#include <headroom/plan/search.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace headroom {

/// What micro-batches of one size cost. The bytes of parameter gradients are not part of it, only
/// what else operations need while gradients appear or are added to.
struct PagedCosts {
  ChainCosts first;  ///< of the first of an update, within whose backward gradients appear
  ChainCosts later;  ///< of the others, which find gradients
  std::int64_t input_bytes = 0;  ///< in memory from a micro-batch's forward to its backward
};

struct PagedRequest {
  std::int64_t budget_bytes = 0;      ///< everything that may be live at once
  std::int64_t num_samples = 0;       ///< of one update
  std::int64_t micro_batch_size = 0;  ///< if it is fixed; 0: free
  std::vector<PageUnit> units;
  std::int64_t resident_bytes = 0;  ///< that no unit has: buffers, and what else is always there
  std::int64_t update_ns = 0;       ///< of clipping and updating everything
  bool may_update_in_backward = false;  ///< nothing needs all gradients at once
  DiskSpeed disk;
  /// Of micro-batches of this size. Nothing: known not to fit.
  std::function<std::optional<PagedCosts>(std::int64_t size)> costs;
  std::function<void()> before_each;  ///< called now and then; whatever it throws ends the search
};

struct PagedPlan {
  BatchPlan batch;
  PagingPlan paging;
};

/// The fastest of the plans that it looks at: micro-batches that double, a handful of schedules for
/// each, updates inside the sweeps of micro-batches or after them, and as much resident as then
/// fits, what moves most often first. Nothing when none fits.
std::optional<PagedPlan> make_paged_plan(const PagedRequest& request);

/// The smallest budget that make_paged_plan() is sure to serve, its own budget ignored. Nothing
/// when no size was measured whole.
std::optional<std::int64_t> paged_floor(const PagedRequest& request);

}  // namespace headroom
