// Which plan a window is trained with, where samples differ in shape.
#include "report/json.h"
#include "train/trainer_state.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace headroom {

void Trainer::State::look_at_first_window() {
  buckets.clear();
  bucket.clear();
  if (arguments.memory_budget_bytes == 0)
    return;  // without a budget one plan is as good as another
  const std::vector<std::int64_t> window = WindowWalk(grouping()).next();
  try {
    const Shapes shapes = shapes_of(load({window.front()}));
    bucket = first_bucket = bucket_key(shapes);
    buckets[bucket] = {shapes, window, std::nullopt};
  } catch (const c10::OutOfMemoryError&) {
    // Planning will say what the floor is.
  }
}

bool Trainer::State::wants_other_plan(const MicroBatch& micro, bool is_first) {
  if (bucket.empty()) return false;
  window_shapes = merged(window_shapes, shapes_of(micro));
  // Only a window that starts can have a plan for smaller shapes; one that goes on keeps its plan
  // while that covers what comes. With several ranks none knows what the others met, and a plan for
  // larger shapes serves: to ask would undo what they have done.
  const bool is_covered = covers(buckets.at(bucket).largest, window_shapes);
  return !is_covered || (is_first && num_ranks == 1 && bucket_key(window_shapes) != bucket);
}

void Trainer::State::plan_for_window(const ShareReport& agreed, std::int64_t num_samples) {
  window_shapes = agreed.shapes;
  bucket = bucket_key(window_shapes);
  ShapeBucket& entry = buckets[bucket];
  if (entry.plan && covers(entry.largest, window_shapes)) {
    plan = *entry.plan;
    return;
  }
  const bool is_new = entry.largest.empty();
  entry.largest = merged(entry.largest, window_shapes);
  entry.samples = agreed.samples;
  use_plan(plan_together([&] {
    RunPlanRequest request = planning_request();
    request.budget_bytes = agreed.cap_bytes;
    request.global_batch = std::max(num_samples, request.global_batch);
    return plan_with_any_split(std::move(request));
  }));
  if (is_new) {
    tell(fmt::format("shape bucket up to {}: micro-batch {} x {} steps, predicted peak {} of {}",
                     to_text(bucket_bounds(entry.largest)), plan.micro_batch,
                     plan.num_micro_batches, format_bytes(plan.predicted_peak_bytes),
                     format_bytes(plan.budget_bytes)));
  }
  if (comm->is_first()) write(fmt::format("plan-{}.json", bucket), to_json(plan));
}

// The user's split stays as it is while it fits, because another one would change the order of
// sums.
RunPlan Trainer::State::plan_with_any_split(RunPlanRequest request) const {
  try {
    return plan_run(request, chain);
  } catch (const BudgetError&) {
    if (request.fixed_micro_batch == 0) throw;
  }
  request.fixed_micro_batch = 0;
  return plan_run(request, chain);
}

void Trainer::State::use_plan(RunPlan made) {
  plan = std::move(made);
  ++num_plans;
  if (plan.update_in_backward && optimizer && !in_backward) watch_backward();
  position.micro_batch = plan.micro_batch;
  if (bucket.empty()) return;
  buckets.at(bucket).plan = plan;
  position.micro_batch_by_shape[bucket] = plan.micro_batch;
}

std::int64_t Trainer::State::predicted_peak_bytes() const {
  std::int64_t bytes = plan.predicted_peak_bytes;
  for (const auto& [key, entry] : buckets) {
    if (entry.plan) bytes = std::max(bytes, entry.plan->predicted_peak_bytes);
  }
  return bytes;
}

std::int64_t Trainer::State::smallest_micro_batch() const {
  std::int64_t size = std::max<std::int64_t>(plan.micro_batch, 1);
  for (const auto& [key, entry] : buckets) {
    if (entry.plan) size = std::min(size, entry.plan->micro_batch);
  }
  return size;
}

}  // namespace headroom
