#include "plan/page_walk.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace headroom {
namespace {

// Operators make scalars of the numbers that tensors are multiplied with.
constexpr std::int64_t kScalarBytes = 64;

bool uses_stage(const PageUnit& unit, int stage) {
  return std::find(unit.stages.begin(), unit.stages.end(), stage) != unit.stages.end();
}

std::int64_t transfer_ns(double ns_per_byte, std::int64_t bytes) {
  return std::llround(ns_per_byte * static_cast<double>(bytes));
}

}  // namespace

PageWalk::PageWalk(const PagingPlan& plan, const std::vector<PageStep>& steps)
    : plan_(plan), steps_(steps), pages_(plan.units.size() * kNumPageKinds) {
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (!is_paged(page) && Page::at(page).kind != PageKind::kGradients) put(page, Place::kMemory);
  }
  moving_.clear();
  // Gradients of the update before are where they were left.
  std::vector<bool> is_known(pages_.size(), false);
  for (const PageStep& step : steps) {
    for (const PageUse& use : step.uses) {
      const std::size_t page = use.page.index();
      if (use.page.kind != PageKind::kGradients || is_known[page]) continue;
      is_known[page] = true;
      if (!use.is_born && !is_paged(page)) put(page, Place::kMemory);
    }
  }
}

bool PageWalk::is_paged(std::size_t page) const {
  return plan_.pages(Page::at(page).unit, Page::at(page).kind);
}

std::int64_t PageWalk::bytes_of(std::size_t page) const {
  return plan_.units[Page::at(page).unit].bytes_of(Page::at(page).kind);
}

void PageWalk::put(std::size_t page, Place place) {
  if (pages_[page].place == Place::kDisk) {
    resident_bytes_ += bytes_of(page);
    moving_.push_back(page);
  }
  pages_[page].place = place;
  if (place == Place::kDisk) resident_bytes_ -= bytes_of(page);
}

PageMoves PageWalk::before(std::size_t step) {
  std::vector<bool> wanted(pages_.size(), false);
  const std::size_t end = std::min(steps_.size(), step + (plan_.reads_ahead ? 2 : 1));
  for (std::size_t i = step; i < end; ++i) {
    for (const PageUse& use : steps_[i].uses) wanted[use.page.index()] = true;
  }
  PageMoves moves;
  let_go(step, wanted, moves);
  if (step == steps_.size()) return moves;
  fetch(steps_[step], moves.read);
  for (const PageUse& use : steps_[step].uses) {
    Status& status = pages_[use.page.index()];
    if (status.place == Place::kReading) {
      moves.awaited.push_back(use.page.index());
      status.place = Place::kMemory;
    }
    if (status.place == Place::kDisk) put(use.page.index(), Place::kMemory);  // it is born
    status.is_dirty = status.is_dirty || use.is_written;
    status.is_dead = use.dies;
  }
  if (plan_.reads_ahead && step + 1 < steps_.size()) fetch(steps_[step + 1], moves.ahead);
  return moves;
}

void PageWalk::let_go(std::size_t step, const std::vector<bool>& wanted, PageMoves& moves) {
  for (const std::size_t page : moving_) {
    Status& status = pages_[page];
    if (status.place == Place::kWriting) {
      moves.finished.push_back(page);
      status.is_dirty = false;
      put(page, Place::kMemory);
    }
    if (status.place != Place::kMemory) continue;
    if (status.is_dead) {
      status = {status.place, false, false};
      moves.freed.push_back(page);
      put(page, Place::kDisk);
    } else if (is_paged(page) && !wanted[page]) {
      if (!status.is_dirty) {
        moves.freed.push_back(page);
        put(page, Place::kDisk);
        continue;
      }
      moves.written.push_back(page);
      status.place = Place::kWriting;
      if (plan_.reads_ahead && step < steps_.size()) continue;
      moves.settled.push_back(page);
      moves.freed.push_back(page);
      status.is_dirty = false;
      put(page, Place::kDisk);
    }
  }
  moving_.erase(
      std::remove_if(moving_.begin(), moving_.end(),
                     [&](std::size_t page) { return pages_[page].place == Place::kDisk; }),
      moving_.end());
}

bool PageWalk::has_unwritten() const {
  return std::any_of(moving_.begin(), moving_.end(), [&](std::size_t page) {
    return pages_[page].is_dirty && Page::at(page).kind != PageKind::kGradients;
  });
}

void PageWalk::fetch(const PageStep& step, std::vector<std::size_t>& moves) {
  for (const PageUse& use : step.uses) {
    const std::size_t page = use.page.index();
    if (use.is_born || pages_[page].place != Place::kDisk) continue;
    moves.push_back(page);
    put(page, Place::kReading);
  }
}

std::vector<PageStep> micro_batch_steps(const std::vector<PageUnit>& units,
                                        const Schedule& schedule, bool gradients_exist) {
  std::vector<PageStep> steps;
  std::vector<bool> has_gradient(units.size(), gradients_exist);
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.kind == OperationKind::kFree) continue;
    PageStep step;
    if (!schedule.curve.empty()) {
      step.ns = schedule.curve[i].ns;
      step.peak_bytes = schedule.curve[i].peak_bytes;
      step.before_bytes = i > 0 ? schedule.curve[i - 1].live_bytes : 0;
      step.after_bytes = schedule.curve[i].live_bytes;
    }
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      if (!uses_stage(units[unit], operation.stage)) continue;
      step.uses.push_back({{unit, PageKind::kWeights}});
      if (operation.kind != OperationKind::kBackward) continue;
      PageUse gradients{{unit, PageKind::kGradients}};
      gradients.is_written = true;
      gradients.is_born = !has_gradient[unit];
      has_gradient[unit] = true;
      step.uses.push_back(gradients);
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

namespace {

// Updates take their time by the bytes of weights.
class UnitUpdates {
 public:
  UnitUpdates(const PagingPlan& plan, std::int64_t update_ns) : plan_(plan) {
    std::int64_t all_bytes = 0;
    for (const PageUnit& unit : plan.units) all_bytes += unit.bytes_of(PageKind::kWeights);
    ns_per_byte_ =
        static_cast<double>(update_ns) / static_cast<double>(std::max<std::int64_t>(all_bytes, 1));
  }

  bool is_trained(std::size_t unit) const {
    return plan_.units[unit].bytes_of(PageKind::kGradients) > 0;
  }

  PageStep of(std::size_t unit) const {
    const PageUnit& page_unit = plan_.units[unit];
    PageStep step;
    step.updated = unit;
    step.peak_bytes = kScalarBytes;
    step.ns = transfer_ns(ns_per_byte_, page_unit.bytes_of(PageKind::kWeights));
    step.uses = {{{unit, PageKind::kWeights}, true, false, false},
                 {{unit, PageKind::kGradients}, false, false, true}};
    if (plan_.streams(unit)) {
      step.peak_bytes += page_unit.stream_bytes;
      step.streamed_bytes = page_unit.bytes_of(PageKind::kState);
    } else {
      step.uses.push_back({{unit, PageKind::kState}, true, false, false});
    }
    return step;
  }

 private:
  const PagingPlan& plan_;
  double ns_per_byte_ = 0;
};

}  // namespace

std::vector<PageStep> update_steps(const PagingPlan& plan, std::int64_t update_ns) {
  const UnitUpdates updates(plan, update_ns);
  std::vector<PageStep> steps;
  for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
    if (updates.is_trained(unit)) steps.push_back(updates.of(unit));
  }
  return steps;
}

std::vector<PageStep> window_steps(const PagingPlan& plan, std::vector<PageStep> micro_batches,
                                   std::int64_t update_ns) {
  if (plan.updates == UpdateTime::kAfterBackward) {
    for (PageStep& step : update_steps(plan, update_ns)) micro_batches.push_back(std::move(step));
    return micro_batches;
  }
  const bool is_before = plan.updates == UpdateTime::kInNextForward;
  // The step next to which a unit is updated: the first that needs its weights, or the last that
  // adds to its gradients.
  std::vector<std::vector<std::size_t>> updated_at(micro_batches.size());
  const UnitUpdates updates(plan, update_ns);
  for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
    if (!updates.is_trained(unit)) continue;
    const Page page{unit, is_before ? PageKind::kWeights : PageKind::kGradients};
    std::optional<std::size_t> place;
    for (std::size_t i = 0; i < micro_batches.size() && !(is_before && place); ++i) {
      for (const PageUse& use : micro_batches[i].uses) {
        if (use.page.index() == page.index()) place = i;
      }
    }
    if (place) updated_at[*place].push_back(unit);
  }
  std::vector<PageStep> steps;
  for (std::size_t i = 0; i < micro_batches.size(); ++i) {
    const std::int64_t live =
        is_before ? micro_batches[i].before_bytes : micro_batches[i].after_bytes;
    if (!is_before) steps.push_back(std::move(micro_batches[i]));
    for (const std::size_t unit : updated_at[i]) {
      steps.push_back(updates.of(unit));
      steps.back().peak_bytes += live;
    }
    if (is_before) steps.push_back(std::move(micro_batches[i]));
  }
  return steps;
}

std::vector<PageStep> forward_steps(const std::vector<PageUnit>& units, std::size_t num_stages) {
  std::vector<PageStep> steps(num_stages);
  for (std::size_t stage = 0; stage < num_stages; ++stage) {
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      if (uses_stage(units[unit], static_cast<int>(stage)))
        steps[stage].uses.push_back({{unit, PageKind::kWeights}});
    }
  }
  return steps;
}

PageReplay replay(const PagingPlan& plan, const std::vector<PageStep>& steps,
                  const DiskSpeed& disk) {
  PageWalk walk(plan, steps);
  PageReplay result;
  std::vector<std::int64_t> done(plan.units.size() * kNumPageKinds, 0);
  std::int64_t now = 0, disk_free = 0;
  const auto start = [&](const std::vector<std::size_t>& pages, double ns_per_byte,
                         std::int64_t& total) {
    for (const std::size_t page : pages) {
      const std::int64_t bytes = plan.units[Page::at(page).unit].bytes_of(Page::at(page).kind);
      const std::int64_t ns = transfer_ns(ns_per_byte, bytes);
      disk_free = done[page] = std::max(disk_free, now) + ns;
      result.disk_ns += ns;
      total += bytes;
    }
  };
  const auto bytes_of = [&](const std::vector<std::size_t>& pages) {
    std::int64_t bytes = 0;
    for (const std::size_t page : pages)
      bytes += plan.units[Page::at(page).unit].bytes_of(Page::at(page).kind);
    return bytes;
  };
  const auto wait = [&](const std::vector<std::size_t>& pages) {
    for (const std::size_t page : pages) {
      result.wait_ns += std::max<std::int64_t>(0, done[page] - now);
      now = std::max(now, done[page]);
    }
  };
  for (std::size_t i = 0; i <= walk.steps().size(); ++i) {
    const PageMoves moves = walk.before(i);
    wait(moves.finished);
    start(moves.written, disk.write_ns_per_byte, result.bytes_written);
    wait(moves.settled);
    start(moves.read, disk.read_ns_per_byte, result.bytes_read);
    wait(moves.awaited);
    start(moves.ahead, disk.read_ns_per_byte, result.bytes_read);
    if (i == walk.steps().size()) break;
    const PageStep& step = walk.steps()[i];
    if (step.streamed_bytes > 0) {
      const std::int64_t ns =
          transfer_ns(disk.read_ns_per_byte + disk.write_ns_per_byte, step.streamed_bytes);
      disk_free = std::max(disk_free, now) + ns;
      result.disk_ns += ns;
      result.wait_ns += std::max<std::int64_t>(0, disk_free - now - step.ns);
      now = std::max(now, disk_free - step.ns);
      result.bytes_read += step.streamed_bytes;
      result.bytes_written += step.streamed_bytes;
    }
    // What moves while the step computes makes it longer.
    const std::int64_t beside = bytes_of(moves.written) - bytes_of(moves.settled) +
                                bytes_of(moves.ahead) + 2 * step.streamed_bytes;
    const std::int64_t taken = transfer_ns(disk.taken_ns_per_byte, beside);
    result.wait_ns += taken;
    now += step.ns + taken;
    std::int64_t& peak = step.updated ? result.update_peak_bytes : result.forward_peak_bytes;
    peak = std::max(peak, walk.resident_bytes() + step.peak_bytes);
  }
  result.peak_bytes = std::max(result.forward_peak_bytes, result.update_peak_bytes);
  result.time_ns = now;
  return result;
}

}  // namespace headroom
