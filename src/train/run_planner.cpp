#include "train/run_planner.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>

#include "train/stop.h"
#include "train/update_timing.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace headroom {

RunPlanner::RunPlanner(const RunSettings& settings, const Chain& chain, const Dataset& data,
                       const RankGroup& ranks, StaticPager* pager)
    : settings_(settings), chain_(chain), data_(data), ranks_(ranks), pager_(pager) {}

void RunPlanner::start(const TrainingPosition& saved) {
  look_at_first_window(saved.global_step);
  splits_ = saved.micro_batch_by_shape;
  saved_micro_batch_ = saved.micro_batch;
  const bool is_measured = budget_bytes_ > 0 || !policy_.empty();
  if (ranks_.is_first() && is_measured) update_ns_ = measure_update();
  const std::vector<std::int64_t> sizes =
      settings_.grouping(data_).window_sizes(saved.global_step, settings_.total_updates(data_));
  // The first one last, so that it is the one in use; every one of them must fit.
  for (std::size_t i = sizes.size(); i-- > 0;) {
    use(ranks_.plan_together(
            [&] { return plan_run(request(sizes[i]), settings_, chain_, book()); }),
        sizes[i]);
    if (i > 0 && tell_) tell_({"", false, plan_name(sizes[i])}, plan_);
  }
  is_training_ = true;
}

RunPlan RunPlanner::preview() {
  look_at_first_window(0);
  keeps_profiles_ = false;  // a plan that is only shown leaves nothing behind
  update_ns_ = measure_update();
  RunPlanRequest asked = request(std::min(settings_.window_samples(), data_.size()));
  asked.with_alternatives = true;
  RunPlan plan = plan_run(asked, settings_, chain_, book());
  for (const std::string& name : optimizer_names())
    plan.optimizer_state_bytes.emplace_back(name, settings_.optimizer_bytes(chain_, name));
  return plan;
}

void RunPlanner::look_at_first_window(std::int64_t num_updates) {
  buckets_.clear();
  bucket_.clear();
  plan_ = {};
  num_plans_ = num_recoveries_ = 0;
  is_training_ = tracks_shapes_ = false;
  budget_bytes_ = settings_.arguments.memory_budget_bytes;
  policy_ = settings_.arguments.gradient_checkpointing;
  buckets_[bucket_];
  if (budget_bytes_ == 0) return;  // without a budget one plan is as good as another
  const Window window = WindowWalk(settings_.grouping(data_), num_updates).next();
  try {
    const OwnerScope owner(Owner::kInputs);
    const Shapes shapes = shapes_of(data_.load({window.samples.front()}));
    buckets_.clear();
    bucket_ = first_bucket_ = bucket_key(shapes);
    // Others may be longer: cut, they would have values that point behind their end.
    buckets_[bucket_] = {shapes, {window.samples.front()}, {}, nullptr};
    tracks_shapes_ = true;
  } catch (const c10::OutOfMemoryError&) {
    // Planning will say what the floor is.
  }
}

MicroBatch RunPlanner::probe_batch(const std::string& key, std::int64_t num_samples) const {
  const Bucket& bucket = buckets_.at(key);
  std::vector<std::int64_t> indices(static_cast<std::size_t>(num_samples));
  for (std::size_t i = 0; i < indices.size(); ++i) {
    indices[i] = tracks_shapes_ ? bucket.samples[i % bucket.samples.size()]
                                : static_cast<std::int64_t>(i) % data_.size();
  }
  const OwnerScope owner(Owner::kInputs);
  MicroBatch micro = data_.load(indices);
  return tracks_shapes_ ? with_shapes(std::move(micro), bucket.largest) : micro;
}

std::string RunPlanner::plan_name(std::int64_t window_samples) const {
  if (window_samples == std::min(settings_.window_samples(), data_.size())) return bucket_;
  return fmt::format("{}{}window{}", bucket_, bucket_.empty() ? "" : "_", window_samples);
}

RunPlanRequest RunPlanner::request(std::int64_t window_samples) const {
  RunPlanRequest request;
  request.window_samples = window_samples;
  const std::int64_t most = share_of(window_samples, 0, settings_.num_ranks).end;
  request.fixed_micro_batch = std::min(settings_.arguments.fixed_micro_batch(), most);
  // Another split would change the order of sums.
  const auto split = splits_.find(plan_name(window_samples));
  const std::int64_t before = !tracks_shapes_          ? saved_micro_batch_
                              : split != splits_.end() ? split->second
                                                       : 0;
  if (request.fixed_micro_batch == 0) request.fixed_micro_batch = std::min(before, most);
  request.budget_bytes = budget_bytes_;
  request.policy = policy_;
  request.optimizer_is_allocated = is_training_;
  request.update_ns = update_ns_;
  request.pager = pager_;
  if (plan_.is_predicted)
    request.time_ratio = plan_.time_ratio;  // while it trains, a run has no time for trials
  return request;
}

ProfileBook& RunPlanner::book() {
  Bucket& bucket = buckets_.at(bucket_);
  if (bucket.book) return *bucket.book;
  std::string folder, key;
  const bool is_measured = budget_bytes_ > 0 || !policy_.empty();
  if (keeps_profiles_ && is_measured) {
    folder = settings_.arguments.output_dir + "/profile" +
             (bucket_ == first_bucket_ ? "" : "/" + bucket_);
    key = settings_.cost_key(chain_);
    if (tracks_shapes_) key += " shapes " + to_text(bucket.largest);
  }
  bucket.book = std::make_shared<ProfileBook>(
      chain_, [this, name = bucket_](std::int64_t size) { return probe_batch(name, size); },
      settings_.precision.keep_in_half, settings_.precision.compute_in_half,
      settings_.arguments.spill_dir, folder, key);
  return *bucket.book;
}

std::optional<std::int64_t> RunPlanner::measure_update() {
  const double max_norm = settings_.arguments.max_grad_norm;
  const std::optional<double> ns = book().figure(
      fmt::format("update {} momentum {} clipped {}", settings_.optimizer.name,
                  settings_.optimizer.momentum, max_norm > 0),
      [&] { return time_update(chain_.named_parameters(), settings_.optimizer, max_norm); });
  return ns ? std::make_optional(static_cast<std::int64_t>(*ns)) : std::nullopt;
}

void RunPlanner::begin_window(const Window& window) {
  num_recoveries_here_ = 0;
  window_shapes_.clear();
  if (plan_.global_batch == window.full_size) return;
  const std::map<std::int64_t, RunPlan>& plans = buckets_.at(bucket_).plans;
  const auto found = plans.find(window.full_size);
  if (found != plans.end()) {
    plan_ = found->second;
    return;
  }
  use(make_plan_for(window.full_size), window.full_size);
  if (tell_) tell_({"", false, plan_name(window.full_size)}, plan_);
}

bool RunPlanner::serves(const MicroBatch& micro, bool is_first) {
  if (!tracks_shapes_) return true;
  window_shapes_ = merged(window_shapes_, shapes_of(micro));
  // Only a window that starts can have a plan for smaller shapes; one that goes on keeps its plan
  // while that covers what comes. With several ranks none knows what the others met, and a plan for
  // larger shapes serves: to ask would undo what they have done.
  const bool has_smaller_plan =
      is_first && settings_.num_ranks == 1 && bucket_key(window_shapes_) != bucket_;
  return covers(buckets_.at(bucket_).largest, window_shapes_) && !has_smaller_plan;
}

void RunPlanner::replace(const ShareReport& agreed, const Window& window) {
  budget_bytes_ = agreed.cap_bytes;
  agreed.outcome == ShareOutcome::kOutOfMemory ? replan_for_cap(agreed, window)
                                               : replan_for_shapes(agreed, window.full_size);
}

void RunPlanner::replan_for_shapes(const ShareReport& agreed, std::int64_t window_samples) {
  window_shapes_ = agreed.shapes;
  bucket_ = bucket_key(window_shapes_);
  Bucket& bucket = buckets_[bucket_];
  const bool is_covered = covers(bucket.largest, window_shapes_);
  const auto found = bucket.plans.find(window_samples);
  if (is_covered && found != bucket.plans.end()) {
    plan_ = found->second;
    return;
  }
  const bool is_new = bucket.largest.empty();
  if (!is_covered) bucket = {merged(bucket.largest, window_shapes_), agreed.samples, {}, nullptr};
  use(make_plan_for(window_samples), window_samples);
  if (!tell_) return;
  PlanNews news{"", false, plan_name(window_samples)};
  if (is_new) {
    news.message = fmt::format(
        "shape bucket up to {}: micro-batch {} x {} steps, predicted peak {} of {}",
        to_text(bucket_bounds(bucket.largest)), plan_.micro_batch(), plan_.num_micro_batches(),
        format_bytes(plan_.predicted_peak_bytes()), format_bytes(plan_.budget_bytes));
  }
  tell_(news, plan_);
}

void RunPlanner::replan_for_cap(const ShareReport& agreed, const Window& window) {
  if (budget_bytes_ == 0)
    throw BudgetError(fmt::format(
        "memory ran out ({}); set --memory_budget to what this machine can give", agreed.reason));
  ++num_recoveries_;
  splits_.clear();  // what fitted before may not fit now
  for (auto& [key, bucket] : buckets_) bucket.plans.clear();
  policy_ = "optimal";
  // Twice at the same update: the prediction was too low for some reason outside of it, and a part
  // of the budget is left free.
  use(make_plan_for(window.full_size, num_recoveries_here_ * (budget_bytes_ / 50)),
      window.full_size);
  ++num_recoveries_here_;
  if (!tell_) return;
  tell_({fmt::format("update {}: memory ran out ({}); the step is undone and made again with {} x "
                     "{} samples, predicted peak {} of {}",
                     window.update, agreed.reason, plan_.num_micro_batches(), plan_.micro_batch(),
                     format_bytes(plan_.predicted_peak_bytes()), format_bytes(budget_bytes_)),
         true, ""},
        plan_);
}

RunPlan RunPlanner::make_plan_for(std::int64_t window_samples, std::int64_t slack_bytes) {
  return ranks_.plan_together([&] {
    RunPlanRequest asked = request(window_samples);
    asked.slack_bytes = slack_bytes;
    return plan_with_any_split(std::move(asked));
  });
}

// The user's split stays as it is while it fits, because another one would change the order of
// sums.
RunPlan RunPlanner::plan_with_any_split(RunPlanRequest asked) {
  try {
    return plan_run(asked, settings_, chain_, book());
  } catch (const BudgetError&) {
    if (asked.fixed_micro_batch == 0) throw;
  }
  asked.fixed_micro_batch = 0;
  return plan_run(asked, settings_, chain_, book());
}

void RunPlanner::use(RunPlan made, std::int64_t window_samples) {
  plan_ = std::move(made);
  ++num_plans_;
  buckets_.at(bucket_).plans[window_samples] = plan_;
  if (tracks_shapes_) splits_[plan_name(window_samples)] = plan_.micro_batch();
}

void RunPlanner::describe_splits(TrainingPosition& position) const {
  if (num_plans_ == 0) return;
  position.micro_batch = plan_.micro_batch();
  position.micro_batch_by_shape = splits_;
}

std::int64_t RunPlanner::predicted_peak_bytes() const {
  std::int64_t bytes = plan_.predicted_peak_bytes();
  for (const auto& [key, bucket] : buckets_) {
    for (const auto& [samples, plan] : bucket.plans)
      bytes = std::max(bytes, plan.predicted_peak_bytes());
  }
  return bytes;
}

std::int64_t RunPlanner::smallest_micro_batch() const {
  std::optional<std::int64_t> size;
  for (const auto& [key, bucket] : buckets_) {
    for (const auto& [samples, plan] : bucket.plans)
      size = std::min(size.value_or(plan.micro_batch()), plan.micro_batch());
  }
  return size.value_or(std::max<std::int64_t>(1, settings_.arguments.fixed_micro_batch()));
}

}  // namespace headroom
