#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include "train/rank_planner.h"
#include "train/stop.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace headroom {

std::optional<PagedPlan> RankPlanner::count_paged() {
  if (!may_page()) return std::nullopt;
  require_known(std::max<std::int64_t>(paged_micro_batch(), 1));
  PagedRequest asked = paged_request(request_.budget_bytes, {});
  if (request_.budget_bytes == 0) {
    const std::optional<std::int64_t> floor = paged_floor(asked);
    if (!floor) return std::nullopt;
    asked.budget_bytes = *floor;
  }
  return make_paged_plan(asked);
}

std::int64_t RankPlanner::in_memory_now_or_later() const {
  std::int64_t weights = 0;
  for (const PageUnit& unit : request_.pager->units()) weights += unit.bytes_of(PageKind::kWeights);
  return request_.pager->resident_bytes() - weights;
}

bool RankPlanner::may_page() const {
  return request_.pager != nullptr && (!chain_.couples_samples() || fixed_micro_batch_ == 0 ||
                                       fixed_micro_batch_ >= num_samples_);
}

std::int64_t RankPlanner::paged_micro_batch() const {
  return chain_.couples_samples() ? num_samples_ : fixed_micro_batch_;
}

PagedRequest RankPlanner::paged_request(std::int64_t budget_bytes, const DiskSpeed& disk) {
  const std::vector<PageUnit>& units = request_.pager->units();
  PagedRequest paged;
  paged.budget_bytes = budget_bytes;
  paged.num_samples = num_samples_;
  paged.micro_batch_size = paged_micro_batch();
  paged.units = units;
  paged.resident_bytes = resident_bytes_ + request_.slack_bytes;
  for (const PageUnit& unit : units) paged.resident_bytes -= unit.bytes_of(PageKind::kWeights);
  paged.update_ns = choice_of(GradientMode::kPreallocated).optimizer_ns;
  paged.may_update_in_backward = settings_.may_update_in_backward;
  paged.disk = disk;
  paged.costs = [this](std::int64_t size) -> std::optional<PagedCosts> {
    if (!may_fit(size)) return std::nullopt;
    MicroBatchCosts first = costs_of(size, GradientMode::kUnallocated);
    MicroBatchCosts later = costs_of(size, GradientMode::kPreallocated);
    return PagedCosts{with_gradients_allocated(std::move(first.chain)),
                      with_gradients_allocated(std::move(later.chain)), first.input_bytes};
  };
  paged.before_each = throw_if_stopped;
  return paged;
}

RunPlan RankPlanner::paged() {
  request_.pager->adopt_least();
  book_.page_with(request_.pager);
  const bool searches = paged_micro_batch() == 0;
  if (searches) book_.explore(num_samples_);
  const std::int64_t least = searches ? 1 : paged_micro_batch();
  if (!book_.measure(least)) throw BudgetError(below_floor_message(std::nullopt, least));
  const PagedRequest asked = paged_request(request_.budget_bytes, request_.pager->measure_disk());
  while (true) {
    std::optional<PagedPlan> found = make_paged_plan(asked);
    if (!found) throw BudgetError(below_floor_message(paged_floor(asked), least));
    const std::int64_t size = found->batch.largest().size;
    if (book_.is_measured(size)) return describe_paged(*std::move(found));
    book_.measure(size);
  }
}

std::string RankPlanner::below_floor_message(std::optional<std::int64_t> floor,
                                             std::int64_t least_size) const {
  if (!floor) {
    return fmt::format(
        "budget {} is below the floor with weights, gradients and optimizer state paged to '{}': "
        "it does not hold one stage at a micro-batch of {} to measure it; raise --memory_budget{}",
        format_bytes(request_.budget_bytes), settings_.arguments.spill_dir, least_size,
        least_size > 1 ? " or use a smaller micro-batch" : "");
  }
  std::string remedies;
  for (const Remedy& remedy : remedies_)
    remedies +=
        fmt::format(" or {} (saves up to {})", remedy.change, format_bytes(remedy.saved_bytes));
  return fmt::format(
      "budget {} is below the {} floor with weights, gradients and optimizer state paged to "
      "'{}'; raise --memory_budget to at least {} bytes{}",
      format_bytes(request_.budget_bytes), format_bytes(*floor), settings_.arguments.spill_dir,
      *floor, remedies);
}

RunPlan RankPlanner::describe_paged(PagedPlan found) {
  RunPlan plan = describe(std::move(found.batch), /*is_paged=*/true);
  for (std::size_t unit = 0; unit < found.paging.units.size(); ++unit) {
    const char* owners[] = {"weights", "gradients", "optimizer"};
    for (std::size_t kind = 0; kind < kNumPageKinds; ++kind) {
      if (found.paging.is_paged[unit][kind])
        plan.bytes_by_owner[owners[kind]] -= found.paging.units[unit].bytes[kind];
    }
  }
  plan.paging = std::move(found.paging);
  return plan;
}

bool RankPlanner::add_paged(RunPlan::Alternative& alternative) {
  if (!may_page()) return false;
  const std::optional<PagedPlan> found =
      make_paged_plan(paged_request(alternative.budget_bytes, request_.pager->measure_disk()));
  if (!found) return false;
  alternative.micro_batch = found->batch.largest().size;
  alternative.num_micro_batches = found->batch.accumulation_steps;
  alternative.step_seconds = 1e-9 * static_cast<double>(found->batch.time_ns);
  alternative.peak_bytes = found->batch.peak_bytes;
  return true;
}

std::optional<PagedPlan> count_paged_plan(const RunPlanRequest& request,
                                          const RunSettings& settings, const Chain& chain,
                                          ProfileBook& book) {
  return RankPlanner(request, settings, chain, book).count_paged();
}

}  // namespace headroom
