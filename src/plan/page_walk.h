#pragma once

// The order in which pages come and go. The prediction and the run walk the same steps, so that
// what is predicted is what happens.

#include <headroom/plan/paging.h>
#include <headroom/plan/schedule.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace headroom {

/// A page is one kind of one unit.
struct Page {
  std::size_t unit = 0;
  PageKind kind = PageKind::kWeights;

  std::size_t index() const { return unit * kNumPageKinds + static_cast<std::size_t>(kind); }
  static Page at(std::size_t index) {
    return {index / kNumPageKinds, static_cast<PageKind>(index % kNumPageKinds)};
  }
};

/// What a step does with a page.
struct PageUse {
  Page page;
  bool is_written = false;  ///< it differs afterwards from what is on disk
  bool is_born = false;     ///< the step makes it: there is nothing to read
  bool dies = false;        ///< nobody reads it after the step
};

/// One piece of work and the pages that must be in memory for it.
struct PageStep {
  std::vector<PageUse> uses;
  std::int64_t ns = 0;                             ///< that it computes
  std::int64_t peak_bytes = 0;                     ///< besides pages and what is always resident
  std::int64_t before_bytes = 0, after_bytes = 0;  ///< the same, before and after it
  std::int64_t streamed_bytes = 0;     ///< that are read and written in pieces meanwhile
  std::optional<std::size_t> updated;  ///< the unit that it updates, if that is what it does
};

/// What happens between two steps, in this order.
struct PageMoves {
  std::vector<std::size_t> finished;  ///< waits until they are written
  std::vector<std::size_t> written;   ///< starts to write them
  std::vector<std::size_t> settled;   ///< of those, waits for them at once
  std::vector<std::size_t> freed;     ///< are in memory no more
  std::vector<std::size_t> read;      ///< take memory, and start to come
  std::vector<std::size_t> awaited;   ///< waits until they are read
  std::vector<std::size_t> ahead;     ///< as `read`, for the step after
};

class PageWalk {
 public:
  /// Both must stay as they are.
  PageWalk(const PagingPlan& plan, const std::vector<PageStep>& steps);

  /// What to do before a step, which must be the one after that of the call before; before the
  /// number of steps: at the end, when nothing paged stays.
  PageMoves before(std::size_t step);
  /// Of all pages, during the step that before() was called for last.
  std::int64_t resident_bytes() const { return resident_bytes_; }
  /// The same for one page. No other page has a part in it.
  bool is_in_memory(std::size_t page) const { return pages_[page].place != Place::kDisk; }

  /// Whether weights or state were changed and are not known to be on disk, where they are paged.
  bool has_unwritten() const;

  const std::vector<PageStep>& steps() const { return steps_; }

 private:
  enum class Place { kDisk, kReading, kMemory, kWriting };
  struct Status {
    Place place = Place::kDisk;
    bool is_dirty = false;
    bool is_dead = false;  // its last step is done
  };

  bool is_paged(std::size_t page) const;
  std::int64_t bytes_of(std::size_t page) const;
  void put(std::size_t page, Place place);
  void let_go(std::size_t step, const std::vector<bool>& wanted, PageMoves& moves);
  void fetch(const PageStep& step, std::vector<std::size_t>& moves);

  const PagingPlan& plan_;
  const std::vector<PageStep>& steps_;
  std::vector<Status> pages_;
  std::vector<std::size_t> moving_;  // pages that are not on disk, but for those that always stay
  std::int64_t resident_bytes_ = 0;
};

/// The steps of a micro-batch: one for each operation but kFree, in order. `gradients_exist` says
/// that a micro-batch of the same window came before. The schedule's curve may be empty: a run
/// needs no prediction.
std::vector<PageStep> micro_batch_steps(const std::vector<PageUnit>& units,
                                        const Schedule& schedule, bool gradients_exist);
/// The steps of an update: those of its micro-batches, which micro_batch_steps() made, with the
/// updates of units where the plan wants them. For UpdateTime::kInNextForward the gradients of the
/// update before are there at the start.
std::vector<PageStep> window_steps(const PagingPlan& plan, std::vector<PageStep> micro_batches,
                                   std::int64_t update_ns);
/// The updates of all units that are trained, one after the other.
std::vector<PageStep> update_steps(const PagingPlan& plan, std::int64_t update_ns);
/// The steps of a forward without gradients: one for each stage.
std::vector<PageStep> forward_steps(const std::vector<PageUnit>& units, std::size_t num_stages);

/// What walking the steps comes to.
struct PageReplay {
  std::int64_t time_ns = 0;
  std::int64_t peak_bytes = 0;  ///< pages and steps together
  std::int64_t forward_peak_bytes = 0, update_peak_bytes = 0;
  std::int64_t bytes_read = 0, bytes_written = 0;
  std::int64_t disk_ns = 0, wait_ns = 0;
};
PageReplay replay(const PagingPlan& plan, const std::vector<PageStep>& steps,
                  const DiskSpeed& disk);

}  // namespace headroom
