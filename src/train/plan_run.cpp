#include "train/plan_run.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include "core/hash.h"
#include "core/integers.h"
#include "execute/stage_run.h"
#include "execute/trial.h"
#include "optim/optimizer_table.h"
#include "plan/page_walk.h"
#include "plan/simulate.h"

#include "train/rank_group.h"
#include "train/rank_planner.h"
#include "train/stop.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

// Bytes moved per nanosecond by an update, which is bound by memory: parameters, gradients and
// state are read and mostly written.
constexpr double kUpdateBytesPerNs = 8.0;

// A third of an update, or a moment that nobody notices.
std::int64_t affordable_trial_ns(const BatchPlan& plan) {
  constexpr std::int64_t kMomentNs = 50'000'000;
  return std::max(kMomentNs, plan.time_ns / 3);
}

// Equal for equal lists.
std::string name_of(const std::vector<Operation>& operations) {
  std::string text;
  for (const Operation& each : operations)
    text += fmt::format("{} {} {} {} {};", operation_name(each.kind), each.stage, each.option,
                        each.format, each.finds_input);
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex_digest();
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

// The least that pages occupy beside one stage's activations: nothing resident, nothing read ahead.
std::int64_t least_page_bytes(const std::vector<PageUnit>& units, std::size_t num_stages) {
  PagingPlan plan;
  plan.units = units;
  plan.is_paged.assign(units.size(), {true, true, true});
  Schedule schedule;
  schedule.operations = keep_everything(num_stages);
  schedule.curve.resize(schedule.operations.size());
  const std::vector<PageStep> steps = window_steps(
      plan, micro_batch_steps(units, schedule, /*gradients_exist=*/false), /*update_ns=*/0);
  return replay(plan, steps, {}).peak_bytes;
}

std::vector<Remedy> static_remedies(const RunSettings& settings, const Chain& chain,
                                    std::int64_t static_bytes) {
  std::vector<Remedy> list;
  if (settings.arguments.spill_dir.empty() && settings.num_ranks == 1) {
    const StaticPager pager(chain, "", settings.state_bytes_of_parameter(),
                            has_independent_elements(settings.optimizer.name));
    const std::int64_t saved = static_bytes - least_page_bytes(pager.units(), chain.size());
    if (saved > 0)
      list.push_back({"page weights, gradients and optimizer state with --spill_dir DIR", saved});
  }
  for (const LeanerOptimizer& leaner :
       leaner_optimizers(settings.optimizer, shapes_of(chain.parameters())))
    list.push_back({fmt::format("choose --optim {}", leaner.name), leaner.saved_bytes});
  return list;
}

}  // namespace

RankPlanner::RankPlanner(const RunPlanRequest& request, const RunSettings& settings,
                         const Chain& chain, ProfileBook& book)
    : request_(request),
      settings_(settings),
      chain_(chain),
      book_(book),
      num_samples_(divide_up(request.window_samples, settings.num_ranks)),
      fixed_micro_batch_(why_whole(chain).empty() ? request.fixed_micro_batch : num_samples_),
      prefetches_(settings.arguments.dataloader_num_workers > 0),
      gradient_bytes_(bytes_of(chain.parameters())),
      optimizer_bytes_(settings.optimizer_bytes(chain)),
      scratch_bytes_(update_scratch_bytes(chain, settings.num_ranks)),
      resident_bytes_(
          request.resident_bytes.value_or(MemoryMeter::instance().live_bytes() -
                                          (request.pager != nullptr ? in_memory_now_or_later()
                                           : request.optimizer_is_allocated ? optimizer_bytes_
                                                                            : 0))),
      remedies_(static_remedies(settings, chain, 2 * gradient_bytes_ + optimizer_bytes_)),
      compared_(chain, settings, book, request.window_samples, num_samples_) {}

RunPlan RankPlanner::run() {
  const bool is_optimal =
      request_.budget_bytes > 0 && (request_.policy.empty() || request_.policy == "optimal");
  if (request_.budget_bytes == 0 && request_.policy.empty()) return unmeasured();
  if (!is_optimal || !may_page()) {
    check_static_floor();
    return is_optimal ? optimal() : by_policy();
  }
  try {
    check_static_floor();
    return optimal();
  } catch (const BudgetError&) {
    // Then statics leave the memory.
  }
  return paged();
}

std::int64_t RankPlanner::floor() {
  const std::int64_t steps = divide_up(num_samples_, fixed_size());
  const std::int64_t large = divide_up(num_samples_, steps);
  require_known(large);
  if (num_samples_ % steps != 0) book_.know(large - 1);
  return find_floor(search_request(0)).bytes;
}

RunPlan RankPlanner::unmeasured() const {
  RunPlan plan = describe_split({});
  plan.batch.accumulation_steps = divide_up(num_samples_, fixed_size());
  Schedule schedule;
  schedule.operations = keep_everything(chain_.size());
  plan.batch.micro_batches = {{fixed_size(), plan.batch.accumulation_steps, schedule}};
  return plan;
}

void RankPlanner::check_static_floor() const {
  const std::int64_t gradients = may_update_in_backward() ? 0 : gradient_bytes_;
  const std::int64_t floor = resident_bytes_ + optimizer_bytes_ + gradients + scratch_bytes_;
  if (request_.budget_bytes == 0 || floor <= request_.budget_bytes) return;
  std::string remedies;
  for (const Remedy& remedy : remedies_)
    remedies += fmt::format(" or {} (saves {})", remedy.change, format_bytes(remedy.saved_bytes));
  throw BudgetError(fmt::format(
      "budget {} is below the {} floor of any plan (weights {}, gradients {}, optimizer {}); "
      "raise --memory_budget{}",
      format_bytes(request_.budget_bytes), format_bytes(floor), format_bytes(resident_bytes_),
      format_bytes(gradients), format_bytes(optimizer_bytes_), remedies));
}

bool RankPlanner::may_update_in_backward() const {
  return request_.may_update_in_backward && settings_.may_update_in_backward &&
         request_.pager == nullptr;
}

std::int64_t RankPlanner::fixed_size() const {
  return fixed_micro_batch_ > 0 ? fixed_micro_batch_ : num_samples_;
}

void RankPlanner::require_known(std::int64_t size) {
  if (book_.know(size)) return;
  if (MemoryMeter::instance().cap() == 0) {
    throw BudgetError(fmt::format(
        "memory ran out: this machine does not hold the weights ({}) and one stage at a "
        "micro-batch of {}; use a smaller micro-batch, or set --memory_budget",
        format_bytes(resident_bytes_), size));
  }
  throw BudgetError(
      fmt::format("budget {} is below the floor: it does not hold the weights ({}) and one stage "
                  "at a micro-batch of {}; raise --memory_budget{}",
                  format_bytes(MemoryMeter::instance().cap()), format_bytes(resident_bytes_), size,
                  size > 1 ? " or use a smaller micro-batch" : ""));
}

MicroBatchCosts RankPlanner::costs_of(std::int64_t size, GradientMode gradients) {
  ChainProfile profile = book_.at(size);
  ChainCosts& chain = gradients == GradientMode::kPreallocated ? profile.grads_preallocated
                                                               : profile.grads_unallocated;
  if (gradients == GradientMode::kUpdatedInBackward)
    chain = with_update_in_backward(std::move(chain));
  MicroBatchCosts costs{std::move(chain), profile.input_bytes * (prefetches_ ? 2 : 1)};
  return compared_.apply_to(size) ? compared_.of(size, std::move(costs)) : costs;
}

bool RankPlanner::may_fit(std::int64_t size) {
  return book_.may_fit(size) && (!compared_.apply_to(size) || compared_.fit());
}

StaticChoice RankPlanner::choice_of(GradientMode gradients) const {
  const auto guessed_ns = static_cast<std::int64_t>(
      static_cast<double>(3 * gradient_bytes_ + 2 * optimizer_bytes_) / kUpdateBytesPerNs);
  StaticChoice choice;
  choice.gradients = gradients;
  choice.bytes.weights = resident_bytes_;
  choice.bytes.gradients =
      gradients == GradientMode::kPreallocated ? gradient_bytes_ : compared_.early_gradient_bytes();
  choice.bytes.optimizer = optimizer_bytes_;
  choice.bytes.slack = request_.slack_bytes;
  choice.optimizer_ns = request_.update_ns.value_or(guessed_ns);
  choice.optimizer_transient_bytes = scratch_bytes_;
  choice.max_accumulation_steps = gradients == GradientMode::kPreallocated ? 0 : 1;
  return choice;
}

PlanRequest RankPlanner::search_request(std::int64_t budget_bytes) {
  PlanRequest search;
  search.budget_bytes = budget_bytes;
  search.num_samples = num_samples_;
  search.micro_batch_size = fixed_micro_batch_;
  search.choices = {choice_of(GradientMode::kUnallocated), choice_of(GradientMode::kPreallocated)};
  search.costs = [this](std::int64_t size,
                        const StaticChoice& choice) -> std::optional<MicroBatchCosts> {
    if (!may_fit(size)) return std::nullopt;
    return costs_of(size, choice.gradients);
  };
  search.before_each = throw_if_stopped;
  search.remedies = remedies_;
  return search;
}

RunPlan RankPlanner::optimal() {
  const bool searches = fixed_micro_batch_ == 0;
  if (searches) book_.explore(num_samples_);
  require_known(searches ? book_.measure_smallest() : fixed_size());
  while (true) {
    BatchPlan found = search();
    bool all_known = true;
    for (const PlannedMicroBatches& part : found.micro_batches) {
      all_known = all_known && book_.is_known(part.size);
      book_.know(part.size);
    }
    if (all_known) return describe(std::move(found));
  }
}

BatchPlan RankPlanner::search() {
  PlanRequest request = search_request(request_.budget_bytes);
  try {
    return make_plan(request);
  } catch (const BudgetError&) {
    const bool one_micro_batch = fixed_micro_batch_ == 0 || fixed_micro_batch_ >= num_samples_;
    if (!may_update_in_backward() || !one_micro_batch) throw;
    request.choices = {choice_of(GradientMode::kUpdatedInBackward)};
    request.micro_batch_size = num_samples_;
    try {
      return make_plan(request);
    } catch (const BudgetError&) {
      // The error of the ordinary search says more.
    }
    throw;
  }
}

RunPlan RankPlanner::by_policy() {
  PlanRequest request = search_request(request_.budget_bytes);
  request.micro_batch_size = fixed_size();
  require_known(fixed_size());
  BatchPlan found =
      make_policy_plan(request, parse_policy(request_.policy.empty() ? "none" : request_.policy));
  if (request_.budget_bytes > 0 && found.peak_bytes > request_.budget_bytes) {
    throw BudgetError(
        fmt::format("--gradient_checkpointing {} at a micro-batch of {} needs {}, more than the "
                    "budget of {}; use a smaller "
                    "micro-batch, or --gradient_checkpointing optimal",
                    request_.policy, fixed_size(), format_bytes(found.peak_bytes),
                    format_bytes(request_.budget_bytes)));
  }
  return describe(std::move(found));
}

std::int64_t RankPlanner::load_ns(const BatchPlan& found) const {
  std::int64_t ns = 0;
  for (const PlannedMicroBatches& part : found.micro_batches) {
    if (!prefetches_) ns += part.count * book_.load_ns(part.size);
  }
  return ns;
}

double RankPlanner::step_seconds(const BatchPlan& found, double time_ratio) const {
  std::int64_t stages_ns = 0;
  for (const PlannedMicroBatches& part : found.micro_batches)
    stages_ns += part.count * part.schedule.time_ns;
  return 1e-9 * (time_ratio * static_cast<double>(stages_ns) +
                 static_cast<double>(found.time_ns - stages_ns + load_ns(found)));
}

std::int64_t RankPlanner::trial_size(const BatchPlan& found) {
  const PlannedMicroBatches& part = found.largest();
  const std::int64_t affordable_ns = affordable_trial_ns(found);
  std::int64_t size = part.size;
  if (compared_.apply_to(size)) return size;
  while (size / 2 > 0 && book_.is_known(size / 2) &&
         part.schedule.time_ns / part.size * size > affordable_ns)
    size /= 2;
  return size;
}

double RankPlanner::trial_ratio(const BatchPlan& found) {
  const std::vector<Operation>& operations = found.largest().schedule.operations;
  if (found.gradients == GradientMode::kUpdatedInBackward) return 1.0;
  const std::int64_t size = trial_size(found);
  const std::int64_t predicted_ns =
      simulate(costs_of(size, found.gradients).chain, operations).time_ns;
  if (predicted_ns == 0) return 1.0;
  const bool gradients_appear = found.gradients == GradientMode::kUnallocated;
  ExecutorOptions options = settings_.executor_options();
  options.check_recomputed_values = false;
  options.on_operation = [](std::size_t) { throw_if_stopped(); };
  const auto try_it = [&]() -> std::optional<double> {
    try {
      const std::optional<std::int64_t> ns =
          time_operations(chain_, book_.load(size), operations, options, gradients_appear,
                          affordable_trial_ns(found));
      if (ns) return static_cast<double>(*ns) / static_cast<double>(predicted_ns);
    } catch (const c10::OutOfMemoryError&) {
      // Then training has its own means to continue.
    }
    return std::nullopt;
  };
  return book_
      .figure(fmt::format("trial {} {} {}", size, gradients_appear, name_of(operations)), try_it)
      .value_or(1.0);
}

RunPlan RankPlanner::describe_split(BatchPlan found) const {
  RunPlan plan;
  plan.global_batch = request_.window_samples;
  plan.num_ranks = settings_.num_ranks;
  plan.batch = std::move(found);
  return plan;
}

RunPlan RankPlanner::describe(BatchPlan found, bool is_paged) {
  RunPlan plan = describe_split(std::move(found));
  plan.is_predicted = true;
  plan.budget_bytes = request_.budget_bytes;
  // The whole chain cannot be run at once where it is paged; its times know of the disk.
  plan.time_ratio = is_paged              ? 1.0
                    : request_.time_ratio ? *request_.time_ratio
                                          : trial_ratio(plan.batch);
  book_.save();
  plan.predicted_step_seconds =
      is_paged ? 1e-9 * static_cast<double>(plan.batch.time_ns + load_ns(plan.batch))
               : step_seconds(plan.batch, plan.time_ratio);
  plan.policy = !request_.policy.empty()    ? request_.policy
                : request_.budget_bytes > 0 ? "optimal"
                                            : "none";
  plan.costs = costs_of(plan.micro_batch(), plan.batch.gradients).chain;
  plan.option_names = option_names();
  const std::int64_t weights = bytes_of(weights_of(chain_)),
                     cached = compared_.cached_bytes(plan.micro_batch());
  plan.bytes_by_owner = {{"weights", weights},
                         {"gradients", gradient_bytes_},
                         {"optimizer", optimizer_bytes_},
                         {"inputs", plan.batch.input_bytes - cached},
                         {"activations", plan.batch.largest().schedule.peak_bytes + cached},
                         {"other", std::max<std::int64_t>(0, resident_bytes_ - weights)}};
  plan.profile_seconds = book_.seconds();
  if (request_.with_alternatives && request_.budget_bytes > 0) add_alternatives(plan);
  return plan;
}

std::vector<std::vector<std::string>> RankPlanner::option_names() const {
  std::vector<std::vector<std::string>> all;
  for (std::size_t i = 0; i < chain_.size(); ++i) {
    const Stage& stage = chain_.stage(i);
    const std::vector<std::string> names = stage.options();
    const OptionRange used = options_in_use(stage, settings_.precision.keep_in_half,
                                            settings_.precision.compute_in_half);
    all.emplace_back(names.begin() + used.first, names.begin() + used.first + used.count);
  }
  return all;
}

void RankPlanner::add_alternatives(RunPlan& plan) {
  for (const std::int64_t budget : {request_.budget_bytes / 2, request_.budget_bytes * 2}) {
    RunPlan::Alternative alternative;
    alternative.budget_bytes = budget;
    try {
      const BatchPlan found = make_plan(search_request(budget));
      alternative.fits = true;
      alternative.micro_batch = found.largest().size;
      alternative.num_micro_batches = found.accumulation_steps;
      alternative.step_seconds = step_seconds(found, plan.time_ratio);
      alternative.peak_bytes = found.peak_bytes;
    } catch (const BudgetError&) {
      alternative.fits = add_paged(alternative);
    }
    plan.alternatives.push_back(alternative);
  }
}

void check_split(const Chain& chain, std::int64_t micro_batch, std::int64_t global_batch,
                 std::int64_t num_ranks) {
  const bool is_split = num_ranks > 1 || (micro_batch > 0 && micro_batch < global_batch);
  const std::string reason = is_split ? why_whole(chain) : std::string();
  if (reason.empty()) return;
  throw ConfigError(fmt::format(
      "{} {} share a global batch of {} whose samples the loss of this model compares, but {}, so "
      "that parts of the batch would train another loss; train on one rank and leave out "
      "--gradient_accumulation_steps and --per_device_train_batch_size (a --memory_budget is met "
      "by recomputing), or choose a smaller --global_batch_size",
      num_ranks > 1 ? num_ranks : divide_up(global_batch, micro_batch),
      num_ranks > 1 ? "ranks" : "micro-batches", global_batch, reason));
}

RunPlan plan_run(const RunPlanRequest& request, const RunSettings& settings, const Chain& chain,
                 ProfileBook& book) {
  return RankPlanner(request, settings, chain, book).run();
}

std::int64_t smallest_budget(const RunPlanRequest& request, const RunSettings& settings,
                             const Chain& chain, ProfileBook& book) {
  return RankPlanner(request, settings, chain, book).floor();
}

}  // namespace headroom
