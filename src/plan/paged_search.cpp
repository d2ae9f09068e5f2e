#include "plan/paged_search.h"

#include "core/integers.h"
#include "plan/page_walk.h"
#include "plan/simulate.h"

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

// Micro-batches between the first and the last are alike: one of them is walked for all.
constexpr std::int64_t kMostWalked = 3;

// The operations of `num_steps` micro-batches of these schedules.
std::vector<PageStep> operations_of(const PagedRequest& request, const Schedule& first,
                                    const Schedule& later, std::int64_t input_bytes,
                                    std::int64_t num_steps) {
  std::vector<PageStep> all;
  for (std::int64_t micro = 0; micro < num_steps; ++micro) {
    std::vector<PageStep> steps =
        micro_batch_steps(request.units, micro > 0 ? later : first, micro > 0);
    for (PageStep& step : steps) {
      step.peak_bytes += input_bytes;
      step.before_bytes += input_bytes;
      step.after_bytes += input_bytes;
    }
    all.insert(all.end(), std::make_move_iterator(steps.begin()),
               std::make_move_iterator(steps.end()));
  }
  return all;
}

PagingPlan all_paged(const PagedRequest& request) {
  PagingPlan plan;
  plan.units = request.units;
  plan.is_paged.assign(request.units.size(), {true, true, true});
  return plan;
}

// State passes in pieces where that makes room: for units whose state is at least this part of the
// largest one's.
PagingPlan with_streams(PagingPlan plan, double least_part) {
  std::int64_t largest = 0;
  for (const PageUnit& unit : plan.units) {
    if (unit.stream_bytes > 0) largest = std::max(largest, unit.bytes_of(PageKind::kState));
  }
  plan.streams_state.assign(plan.units.size(), false);
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const PageUnit& unit = plan.units[i];
    const std::int64_t bytes = unit.bytes_of(PageKind::kState);
    plan.streams_state[i] = unit.stream_bytes > 0 && unit.stream_bytes < bytes &&
                            static_cast<double>(bytes) >= least_part * static_cast<double>(largest);
  }
  return plan;
}

// Pages in the order in which it pays to keep them: by how often an update moves them, those that
// several stages use first.
std::vector<Page> by_traffic(const PagedRequest& request, UpdateTime updates,
                             std::int64_t num_steps) {
  const std::int64_t num_sums = num_steps - (updates == UpdateTime::kInBackward ? 1 : 0);
  const auto moves = [&](const Page& page) {
    const auto users = static_cast<std::int64_t>(request.units[page.unit].stages.size());
    if (page.kind == PageKind::kWeights) return 2 * num_steps * users + 2;
    return page.kind == PageKind::kGradients ? 2 * (num_sums * users + users - 1) : 2;
  };
  std::vector<Page> pages;
  for (std::size_t i = 0; i < request.units.size() * kNumPageKinds; ++i) {
    const Page page = Page::at(i);
    if (request.units[page.unit].bytes_of(page.kind) > 0 && moves(page) > 0) pages.push_back(page);
  }
  std::stable_sort(pages.begin(), pages.end(),
                   [&](const Page& a, const Page& b) { return moves(a) > moves(b); });
  return pages;
}

// The most bytes that steps need, as more and more pages stay resident. When a page is in memory
// does not depend on other pages, so that two walks tell it for all of them.
class PagePeaks {
 public:
  // Nothing may be resident yet.
  PagePeaks(const PagingPlan& paging, const std::vector<PageStep>& steps)
      : units_(paging.units), bytes_(steps.size()), is_added_(steps.size()) {
    PagingPlan resident = paging;
    resident.is_paged.assign(units_.size(), {});
    PageWalk as_paged(paging, steps), as_resident(resident, steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      as_paged.before(i);
      as_resident.before(i);
      bytes_[i] = as_paged.resident_bytes() + steps[i].peak_bytes;
      is_added_[i].resize(units_.size() * kNumPageKinds);
      for (std::size_t page = 0; page < is_added_[i].size(); ++page)
        is_added_[i][page] = as_resident.is_in_memory(page) && !as_paged.is_in_memory(page);
    }
  }

  bool fits_with(const Page& page, std::int64_t most_bytes) const {
    const std::int64_t most_before = most_bytes - units_[page.unit].bytes_of(page.kind);
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (bytes_[i] > (is_added_[i][page.index()] ? most_before : most_bytes)) return false;
    }
    return true;
  }

  void keep(const Page& page) {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (is_added_[i][page.index()]) bytes_[i] += units_[page.unit].bytes_of(page.kind);
    }
  }

 private:
  const std::vector<PageUnit>& units_;
  std::vector<std::int64_t> bytes_;  // by step
  std::vector<std::vector<bool>>
      is_added_;  // by step and page: a resident one is there in addition
};

class PagedSize {
 public:
  PagedSize(const PagedRequest& request, std::int64_t num_steps, PagedCosts costs)
      : request_(request),
        num_steps_(num_steps),
        size_(divide_up(request.num_samples, num_steps)),
        costs_(std::move(costs)),
        solver_(num_steps == 1 ? costs_.first : costs_.later, PlanRequest::quick()) {}

  std::int64_t floor() {
    const Schedule schedule = solver_.schedule(solver_.smallest_budget_bytes());
    const PagingPlan paging = with_streams(all_paged(request_), 0.0);
    return request_.resident_bytes + walk(paging, steps_for(paging, schedule)).peak_bytes;
  }

  /// The fastest plan of this size.
  std::optional<PagedPlan> best() {
    // Least in pieces first: computing waits for those.
    constexpr double kLeastParts[] = {2.0, 0.5, 0.0};
    const UpdateTime early =
        request_.may_update_in_backward ? UpdateTime::kInBackward : UpdateTime::kInNextForward;
    std::optional<PagedPlan> found;
    for (const bool reads_ahead : {true, false}) {
      for (const UpdateTime updates : {early, UpdateTime::kAfterBackward}) {
        std::vector<bool> streams;
        for (const double least_part : kLeastParts) {
          PagingPlan paging = with_streams(all_paged(request_), least_part);
          if (paging.streams_state == streams) continue;
          streams = paging.streams_state;
          paging.reads_ahead = reads_ahead;
          paging.updates = updates;
          keep_faster(found, best_of(paging, found));
        }
      }
    }
    return found;
  }

 private:
  static void keep_faster(std::optional<PagedPlan>& found, std::optional<PagedPlan> other) {
    if (other && (!found || other->batch.time_ns < found->batch.time_ns)) found = std::move(other);
  }

  // The fastest with these pages, for a handful of schedules; `found` is what it must beat.
  std::optional<PagedPlan> best_of(const PagingPlan& paging,
                                   const std::optional<PagedPlan>& found) {
    const std::int64_t most =
        request_.budget_bytes - request_.resident_bytes - costs_.input_bytes - pages_alone(paging);
    const std::int64_t least = solver_.smallest_budget_bytes();
    std::optional<PagedPlan> best = found;
    for (const int quarters : {4, 3, 2, 1, 0}) {
      const std::int64_t given = most <= least ? least : least + (most - least) / 4 * quarters;
      keep_faster(best, solve(paging, given, best));
      if (most <= least) break;
    }
    return best;
  }

  // The most that pages take where every stage is run once forward and once backward.
  std::int64_t pages_alone(const PagingPlan& paging) const {
    Schedule schedule;
    const auto num_stages = static_cast<int>(costs_.first.stages.size());
    for (int stage = 0; stage < num_stages; ++stage)
      schedule.operations.push_back({OperationKind::kForwardKeep, stage, 0, 0});
    for (int stage = num_stages; stage-- > 0;)
      schedule.operations.push_back({OperationKind::kBackward, stage, 0, 0});
    schedule.curve.resize(schedule.operations.size());
    return replay(paging,
                  window_steps(paging,
                               operations_of(request_, schedule, schedule, 0,
                                             std::min(num_steps_, kMostWalked)),
                               0),
                  request_.disk)
        .forward_peak_bytes;
  }

  // The steps that are walked: of all micro-batches, or of a few and of one less.
  struct Steps {
    std::vector<PageStep> most, less;
  };

  Steps steps_for(const PagingPlan& paging, const Schedule& schedule) const {
    const Schedule first = schedule_from_operations(costs_.first, schedule.operations);
    const auto steps = [&](std::int64_t number) {
      return window_steps(paging,
                          operations_of(request_, first, schedule, costs_.input_bytes, number),
                          request_.update_ns);
    };
    if (num_steps_ <= kMostWalked) return {steps(num_steps_), {}};
    return {steps(kMostWalked), steps(kMostWalked - 1)};
  }

  PageReplay walk(const PagingPlan& paging, const Steps& steps) const {
    PageReplay result = replay(paging, steps.most, request_.disk);
    if (paging.updates == UpdateTime::kInNextForward) {
      // The last update of a run has no forward after it.
      const PageReplay last = replay(paging, update_steps(paging, 0), request_.disk);
      result.update_peak_bytes = std::max(result.update_peak_bytes, last.update_peak_bytes);
      result.peak_bytes = std::max(result.peak_bytes, last.peak_bytes);
    }
    if (steps.less.empty()) return result;
    const PageReplay less = replay(paging, steps.less, request_.disk);
    const std::int64_t more = num_steps_ - kMostWalked;
    for (auto field : {&PageReplay::time_ns, &PageReplay::bytes_read, &PageReplay::bytes_written,
                       &PageReplay::disk_ns, &PageReplay::wait_ns})
      result.*field += more * (result.*field - less.*field);
    return result;
  }

  bool fits(const PageReplay& walked) const {
    return request_.resident_bytes + walked.peak_bytes <= request_.budget_bytes;
  }

  // The schedule for so many bytes, or for as many fewer as its pages turn out to need. Nothing as
  // well where it could not beat `found`.
  std::optional<PagedPlan> solve(PagingPlan paging, std::int64_t chain_bytes,
                                 const std::optional<PagedPlan>& found) {
    constexpr int kMostTries = 6;
    for (int i = 0; i < kMostTries && chain_bytes >= solver_.smallest_budget_bytes(); ++i) {
      const Schedule schedule = solver_.schedule(chain_bytes);
      const Steps steps = steps_for(paging, schedule);
      const PageReplay walked = walk(paging, steps);
      if (fits(walked)) {
        if (found && walked.time_ns - walked.wait_ns >= found->batch.time_ns) return std::nullopt;
        keep_resident(paging, steps);
        return describe(std::move(paging), schedule, steps);
      }
      const std::int64_t excess =
          request_.resident_bytes + walked.peak_bytes - request_.budget_bytes;
      chain_bytes = std::min(chain_bytes, schedule.peak_bytes) - excess;
    }
    return std::nullopt;
  }

  void keep_resident(PagingPlan& paging, const Steps& steps) const {
    std::vector<PagePeaks> peaks{{paging, steps.most}};
    // The last update of a run has no forward after it.
    if (paging.updates == UpdateTime::kInNextForward)
      peaks.emplace_back(paging, update_steps(paging, 0));
    const std::int64_t most_bytes = request_.budget_bytes - request_.resident_bytes;
    for (const Page& page : by_traffic(request_, paging.updates, num_steps_)) {
      // The steps of a state that passes in pieces know of it.
      if (page.kind == PageKind::kState && paging.streams(page.unit)) continue;
      if (!std::all_of(peaks.begin(), peaks.end(),
                       [&](const PagePeaks& each) { return each.fits_with(page, most_bytes); }))
        continue;
      for (PagePeaks& each : peaks) each.keep(page);
      paging.is_paged[page.unit][static_cast<std::size_t>(page.kind)] = false;
    }
  }

  PagedPlan describe(PagingPlan paging, const Schedule& schedule, const Steps& steps) const {
    const PageReplay walked = walk(paging, steps);
    PagedPlan plan;
    plan.batch.gradients =
        num_steps_ == 1 ? GradientMode::kUnallocated : GradientMode::kPreallocated;
    plan.batch.accumulation_steps = num_steps_;
    plan.batch.micro_batches = {{size_, num_steps_, schedule}};
    plan.batch.input_bytes = costs_.input_bytes;
    plan.batch.time_ns = walked.time_ns;
    plan.batch.peak_bytes = request_.resident_bytes + walked.peak_bytes;
    plan.batch.peaks.forward_bytes = plan.batch.peaks.backward_bytes =
        request_.resident_bytes + walked.forward_peak_bytes;
    plan.batch.peaks.update_bytes = request_.resident_bytes + walked.update_peak_bytes;
    paging.bytes_read = walked.bytes_read;
    paging.bytes_written = walked.bytes_written;
    paging.disk_ns = walked.disk_ns;
    paging.wait_ns = walked.wait_ns;
    plan.paging = std::move(paging);
    return plan;
  }

  const PagedRequest& request_;
  const std::int64_t num_steps_;
  const std::int64_t size_;
  const PagedCosts costs_;
  ChainSolver solver_;
};

// One micro-batch, and twice as many until each has one sample.
std::vector<std::int64_t> numbers_of_steps(const PagedRequest& request) {
  if (request.micro_batch_size > 0)
    return {divide_up(request.num_samples, request.micro_batch_size)};
  std::vector<std::int64_t> numbers;
  // As many micro-batches as their largest makes of the samples.
  for (std::int64_t steps = 1; steps < request.num_samples; steps *= 2)
    numbers.push_back(divide_up(request.num_samples, divide_up(request.num_samples, steps)));
  numbers.push_back(request.num_samples);
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

// Whether there is a schedule at all: of a stage that did not fit while it was measured, no number
// is known.
bool is_measured(const ChainCosts& chain) {
  return std::all_of(chain.stages.begin(), chain.stages.end(), [](const StageCosts& stage) {
    return std::any_of(stage.options.begin(), stage.options.end(),
                       [](const StageOption& option) { return option.fits; });
  });
}

template <typename Visit>
void each_size(const PagedRequest& request, Visit visit) {
  for (const std::int64_t steps : numbers_of_steps(request)) {
    if (request.before_each) request.before_each();
    auto costs = request.costs(divide_up(request.num_samples, steps));
    if (!costs || !is_measured(costs->first) || (steps > 1 && !is_measured(costs->later))) continue;
    PagedSize size(request, steps, *std::move(costs));
    visit(size);
  }
}

}  // namespace

std::optional<PagedPlan> make_paged_plan(const PagedRequest& request) {
  std::optional<PagedPlan> best;
  each_size(request, [&](PagedSize& size) {
    std::optional<PagedPlan> plan = size.best();
    if (plan && (!best || plan->batch.time_ns < best->batch.time_ns)) best = std::move(plan);
  });
  return best;
}

std::optional<std::int64_t> paged_floor(const PagedRequest& request) {
  std::optional<std::int64_t> least;
  each_size(request, [&](PagedSize& size) {
    const std::int64_t floor = size.floor();
    least = std::min(least.value_or(floor), floor);
  });
  return least;
}

}  // namespace headroom
