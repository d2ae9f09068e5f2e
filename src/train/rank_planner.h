#pragma once

// Makes one plan of a run. What stays in memory is planned in plan_run.cpp, what is paged in
// paged_plan.cpp.

#include "train/compared_costs.h"
#include "train/plan_run.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

class RankPlanner {
 public:
  RankPlanner(const RunPlanRequest& request, const RunSettings& settings, const Chain& chain,
              ProfileBook& book);

  RunPlan run();

  std::optional<PagedPlan> count_paged();

  std::int64_t floor();

 private:
  // The plan of which nothing has to be known in advance.
  RunPlan unmeasured() const;

  // What no plan can avoid is known without measuring anything.
  void check_static_floor() const;

  // Of weights and state, what is in memory now but will not be counted as such: minus the weights
  // that are on disk now and would be in memory if all were resident.
  std::int64_t in_memory_now_or_later() const;

  // Pages serve smaller budgets still, and an update of theirs can be skipped.
  bool may_update_in_backward() const;

  std::int64_t fixed_size() const;

  void require_known(std::int64_t size);

  MicroBatchCosts costs_of(std::int64_t size, GradientMode gradients);

  // A size that did not fit when it was measured must not be chosen, whatever the line says.
  bool may_fit(std::int64_t size);

  StaticChoice choice_of(GradientMode gradients) const;

  PlanRequest search_request(std::int64_t budget_bytes);

  // Plans from what is known, then measures the chosen sizes and plans again, until all that the
  // plan rests on is known.
  RunPlan optimal();

  // A batch whose samples are compared is paged in one piece, and so not where several were asked
  // for.
  bool may_page() const;

  // 0: free.
  std::int64_t paged_micro_batch() const;

  PagedRequest paged_request(std::int64_t budget_bytes, const DiskSpeed& disk);

  // As optimal(), with what does not fit on disk.
  RunPlan paged();

  // Without a floor: nothing was measured whole, not even a micro-batch of `least_size`.
  std::string below_floor_message(std::optional<std::int64_t> floor, std::int64_t least_size) const;

  RunPlan describe_paged(PagedPlan found);

  // Updating inside backward is the last resort: it cannot skip an update whose gradient is not
  // finite, nor undo one.
  BatchPlan search();

  // A fixed policy, or keeping everything, at a fixed size: as fast and as large as it is.
  RunPlan by_policy();

  // The same for every split, more or less, so that it is no matter of choice. A loader with a
  // thread of its own works meanwhile.
  std::int64_t load_ns(const BatchPlan& found) const;

  double step_seconds(const BatchPlan& found, double time_ratio) const;

  // The samples to try the schedule of the largest micro-batch with: fewer than it has, where one
  // run of them all would take much of an update.
  std::int64_t trial_size(const BatchPlan& found);

  // Runs that schedule as a whole. Updating inside backward is left out: here, nothing would free
  // the gradients.
  double trial_ratio(const BatchPlan& found);

  RunPlan describe_split(BatchPlan found) const;

  RunPlan describe(BatchPlan found, bool is_paged = false);

  std::vector<std::vector<std::string>> option_names() const;

  void add_alternatives(RunPlan& plan);

  bool add_paged(RunPlan::Alternative& alternative);

  const RunPlanRequest& request_;
  const RunSettings& settings_;
  const Chain& chain_;
  ProfileBook& book_;
  const std::int64_t num_samples_;        // of the largest share of a rank
  const std::int64_t fixed_micro_batch_;  // 0: free
  const bool prefetches_;                 // one more micro-batch is in memory
  const std::int64_t gradient_bytes_;
  const std::int64_t optimizer_bytes_;
  const std::int64_t scratch_bytes_;
  const std::int64_t resident_bytes_;  // weights, buffers and whatever else stays
  const std::vector<Remedy> remedies_;
  ComparedCosts compared_;
};

}  // namespace headroom
