#include "train/plan_run.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/log.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/policies.h>
#include "execute/trial.h"
#include "plan/simulate.h"

#include "train/profile_book.h"
#include "train/stop.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace headroom {
namespace {

// Bytes moved per nanosecond by an update, which is bound by memory: parameters, gradients and
// state are read and mostly written.
constexpr double kUpdateBytesPerNs = 8.0;

// With one micro-batch the gradients appear as backward goes; with several they are there from the
// second one on.
constexpr std::size_t kAppearing = 0;
constexpr std::size_t kAllocated = 1;
constexpr const char* kInBackward = "update in backward";

std::int64_t parameter_bytes(const Chain& chain) {
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : chain.parameters())
    bytes += static_cast<std::int64_t>(parameter.nbytes());
  return bytes;
}

std::int64_t weight_bytes(const Chain& chain) {
  std::int64_t bytes = parameter_bytes(chain);
  for (const auto& [name, buffer] : chain.named_buffers())
    bytes += static_cast<std::int64_t>(buffer.nbytes());
  return bytes;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

class BatchPlanner {
 public:
  BatchPlanner(const RunPlanRequest& request, const Chain& chain)
      : request_(request), chain_(chain), book_(*request.book) {
    const std::int64_t live = MemoryMeter::instance().live_bytes();
    resident_bytes_ = request.resident_bytes >= 0
                          ? request.resident_bytes
                          : live - (request.optimizer_is_allocated ? request.optimizer_bytes : 0);
    gradient_bytes_ = parameter_bytes(chain);
  }

  RunPlan run() {
    check_static_floor();
    const bool searches = request_.fixed_micro_batch == 0;
    const bool optimal =
        request_.budget_bytes > 0 && (request_.policy.empty() || request_.policy == "optimal");
    if (!searches || !optimal) return optimal ? plan_optimal(false) : plan_policy();
    book_.explore(request_.rank_batch());
    return plan_optimal(true);
  }

  std::int64_t floor() {
    const std::int64_t steps = divide_up(request_.rank_batch(), fixed_size()),
                       large = divide_up(request_.rank_batch(), steps);
    if (!book_.measure(large)) fail_to_measure(large);
    if (request_.rank_batch() % steps != 0) book_.measure(large - 1);
    return find_floor(search_request(0)).bytes;
  }

 private:
  // What no plan can avoid is known without measuring anything.
  void check_static_floor() const {
    const std::int64_t gradients = request_.may_update_in_backward ? 0 : gradient_bytes_;
    const std::int64_t floor =
        resident_bytes_ + request_.optimizer_bytes + gradients + request_.update_scratch_bytes;
    if (request_.budget_bytes == 0 || floor <= request_.budget_bytes) return;
    std::string remedies;
    for (const Remedy& remedy : request_.remedies)
      remedies += fmt::format(" or {} (saves {})", remedy.change, format_bytes(remedy.saved_bytes));
    throw BudgetError(fmt::format(
        "budget {} is below the {} floor of any plan (weights {}, gradients {}, optimizer {}); "
        "raise --memory_budget{}",
        format_bytes(request_.budget_bytes), format_bytes(floor), format_bytes(resident_bytes_),
        format_bytes(gradients), format_bytes(request_.optimizer_bytes), remedies));
  }

  std::int64_t fixed_size() const {
    return request_.fixed_micro_batch > 0 ? request_.fixed_micro_batch : request_.rank_batch();
  }

  std::int64_t inputs(const ChainProfile& profile) const {
    return profile.input_bytes * (request_.prefetches ? 2 : 1);
  }

  MicroBatchCosts costs_of(std::int64_t size, bool appearing) const {
    const ChainProfile profile = book_.at(size);
    MicroBatchCosts costs{appearing ? profile.appearing : profile.allocated, inputs(profile)};
    // A size that did not fit when it was measured must not be chosen, whatever the line says.
    if (size >= book_.smallest_failure()) {
      costs.chain.stages.front().forward_transient_bytes = kMaxChainBytes / 2;
      for (StageOption& option : costs.chain.stages.front().options)
        option.forward_transient_bytes = kMaxChainBytes / 2;
    }
    return costs;
  }

  PlanRequest search_request(std::int64_t budget_bytes) const {
    const auto guessed_ns = static_cast<std::int64_t>(
        static_cast<double>(3 * gradient_bytes_ + 2 * request_.optimizer_bytes) /
        kUpdateBytesPerNs);
    const std::int64_t update_ns = request_.update_ns > 0 ? request_.update_ns : guessed_ns;
    PlanRequest search;
    search.budget_bytes = budget_bytes;
    search.num_samples = request_.rank_batch();
    search.micro_batch_size = request_.fixed_micro_batch;
    search.choices.resize(2);
    for (StaticChoice& choice : search.choices) {
      choice.bytes.weights = resident_bytes_;
      choice.bytes.optimizer = request_.optimizer_bytes;
      choice.bytes.slack = request_.slack_bytes;
      choice.optimizer_ns = update_ns;
      choice.optimizer_transient_bytes = request_.update_scratch_bytes;
    }
    search.choices[kAppearing].name = "gradients appear in backward";
    search.choices[kAppearing].max_accumulation_steps = 1;
    search.choices[kAllocated].name = "gradients allocated";
    search.choices[kAllocated].bytes.gradients = gradient_bytes_;
    search.costs = [this](std::int64_t size, const StaticChoice& choice) {
      MicroBatchCosts costs = costs_of(size, choice.max_accumulation_steps == 1);
      if (choice.name == kInBackward) costs.chain = with_update_in_backward(std::move(costs.chain));
      return costs;
    };
    search.remedies = request_.remedies;
    search.before_each = throw_if_stopped;
    return search;
  }

  // Plans from what is known, then measures the chosen sizes themselves and plans again, until the
  // plan rests on measurements alone.
  RunPlan plan_optimal(bool searches) {
    if (!searches && !book_.measure(fixed_size())) fail_to_measure(fixed_size());
    if (searches && !book_.measure(1)) fail_to_measure(1);
    while (true) {
      const TrainingPlan found = search();
      bool all_measured = true;
      for (const PlannedMicroBatches& part : found.micro_batches) {
        all_measured = all_measured && book_.is_measured(part.size);
        book_.measure(part.size);
      }
      if (all_measured) return describe(without_inputs_at_update(found));
    }
  }

  // The search holds a micro-batch against the update as well, but by then it is gone.
  static TrainingPlan without_inputs_at_update(TrainingPlan found) {
    found.peaks.update_bytes -= found.input_bytes;
    found.peak_bytes =
        std::max({found.peaks.forward_bytes, found.peaks.backward_bytes, found.peaks.update_bytes});
    return found;
  }

  // Updating inside backward is the last resort: it cannot skip an update whose gradient is not
  // finite, nor undo one.
  TrainingPlan search() {
    PlanRequest request = search_request(request_.budget_bytes);
    try {
      return make_plan(request);
    } catch (const BudgetError&) {
      const bool one_micro_batch =
          request_.fixed_micro_batch == 0 || request_.fixed_micro_batch >= request_.rank_batch();
      if (!request_.may_update_in_backward || !one_micro_batch) throw;
      PlanRequest in_backward = request;
      in_backward.choices = {request.choices[kAppearing]};
      in_backward.choices[0].name = kInBackward;
      in_backward.micro_batch_size = request_.rank_batch();
      try {
        TrainingPlan found = make_plan(in_backward);
        updates_in_backward_ = true;
        return found;
      } catch (const BudgetError&) {
        // The error of the ordinary search says more.
      }
      throw;
    }
  }

  [[noreturn]] void fail_to_measure(std::int64_t size) const {
    const std::int64_t cap = MemoryMeter::instance().cap();
    throw BudgetError(
        fmt::format("budget {} is below the floor: it does not hold the weights ({}) and one stage "
                    "at a micro-batch of {}; raise --memory_budget{}",
                    format_bytes(cap), format_bytes(resident_bytes_), size,
                    size > 1 ? " or use a smaller micro-batch" : ""));
  }

  // A fixed policy, or keeping everything, at a fixed size: as fast and as large as it is.
  RunPlan plan_policy() {
    const std::int64_t size = fixed_size();
    if (!book_.measure(size)) fail_to_measure(size);
    const std::int64_t steps = divide_up(request_.rank_batch(), size);
    const MicroBatchCosts costs = costs_of(size, steps == 1);
    TrainingPlan found;
    found.choice = steps == 1 ? kAppearing : kAllocated;
    found.accumulation_steps = steps;
    found.input_bytes = costs.input_bytes;
    const Plan plan = plan_of_policy(
        costs.chain, parse_policy(request_.policy.empty() ? "none" : request_.policy));
    found.micro_batches.push_back({size, steps, plan});
    const StaticChoice choice = search_request(0).choices[found.choice];
    found.time_ns = plan.time_ns * steps + choice.optimizer_ns;
    const std::int64_t base = choice.bytes.total() + found.input_bytes;
    for (std::size_t i = 0; i < plan.operations.size(); ++i) {
      std::int64_t& peak = plan.operations[i].kind == OperationKind::kBackward
                               ? found.peaks.backward_bytes
                               : found.peaks.forward_bytes;
      peak = std::max(peak, base + plan.curve[i].peak_bytes);
    }
    found.peaks.update_bytes = choice.bytes.weights + choice.bytes.optimizer + gradient_bytes_ +
                               request_.update_scratch_bytes;
    found.peak_bytes =
        std::max({found.peaks.forward_bytes, found.peaks.backward_bytes, found.peaks.update_bytes});
    if (request_.budget_bytes > 0 && found.peak_bytes > request_.budget_bytes) {
      throw BudgetError(
          fmt::format("--gradient_checkpointing {} at a micro-batch of {} needs {}, more than the "
                      "budget of {}; use a smaller "
                      "micro-batch, or --gradient_checkpointing optimal",
                      request_.policy, size, format_bytes(found.peak_bytes),
                      format_bytes(request_.budget_bytes)));
    }
    return describe(found);
  }

  // The same for every split, more or less, so that it is no matter of choice. A loader with a
  // thread of its own works meanwhile.
  std::int64_t load_ns(const TrainingPlan& found) const {
    std::int64_t ns = 0;
    for (const PlannedMicroBatches& part : found.micro_batches) {
      if (!request_.prefetches && book_.is_measured(part.size))
        ns += part.count * book_.load_ns(part.size);
    }
    return ns;
  }

  double step_seconds(const TrainingPlan& found) const {
    std::int64_t stages_ns = 0;
    for (const PlannedMicroBatches& part : found.micro_batches)
      stages_ns += part.count * part.plan.time_ns;
    return 1e-9 * (time_ratio_ * static_cast<double>(stages_ns) +
                   static_cast<double>(found.time_ns - stages_ns + load_ns(found)));
  }

  // Runs the plan of one micro-batch as a whole. Updating inside backward is left out: here,
  // nothing would free the gradients.
  double trial_ratio(const TrainingPlan& found) const {
    const PlannedMicroBatches& part = found.micro_batches.front();
    if (updates_in_backward_ || part.plan.time_ns == 0) return 1.0;
    ExecutorOptions options;
    options.keep_in_half = request_.keep_in_half;
    options.compute_in_half = request_.compute_in_half;
    options.spill_dir = request_.spill_dir;
    if (!request_.spill_dir.empty()) options.boundary_formats = {KeepAs::kDisk};
    options.on_operation = [](std::size_t) { throw_if_stopped(); };
    std::optional<std::int64_t> ns;
    try {
      ns = time_operations(chain_, book_.load(part.size), part.plan.operations, options,
                           found.accumulation_steps == 1);
    } catch (const c10::OutOfMemoryError&) {
      // Then training has its own ways to go on.
    }
    return ns ? static_cast<double>(*ns) / static_cast<double>(part.plan.time_ns) : 1.0;
  }

  RunPlan describe(const TrainingPlan& found) {
    book_.save();
    RunPlan plan;
    plan.global_batch = request_.global_batch;
    plan.num_ranks = request_.num_ranks;
    plan.micro_batch = found.micro_batches.front().size;
    plan.num_micro_batches = found.accumulation_steps;
    for (const PlannedMicroBatches& part : found.micro_batches)
      plan.operations_by_size[part.size] = part.plan.operations;
    plan.update_in_backward = updates_in_backward_;
    plan.is_predicted = true;
    plan.budget_bytes = request_.budget_bytes;
    plan.predicted_peak_bytes = found.peak_bytes;
    time_ratio_ = plan.time_ratio =
        request_.time_ratio > 0.0 ? request_.time_ratio : trial_ratio(found);
    plan.predicted_step_seconds = step_seconds(found);
    plan.policy = request_.policy.empty() ? (request_.budget_bytes > 0 ? "optimal" : "none")
                                          : request_.policy;
    plan.schedule = found.micro_batches.front().plan;
    plan.costs = costs_of(plan.micro_batch, found.choice == kAppearing).chain;
    if (updates_in_backward_) plan.costs = with_update_in_backward(std::move(plan.costs));
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      const Stage& stage = chain_.stage(i);
      std::vector<std::string> names = stage.options();
      if (request_.keep_in_half) {
        names.erase(names.begin(), names.begin() + stage.half_option());
        names.resize(static_cast<std::size_t>(stage.num_half_options()));
      }
      plan.option_names.push_back(std::move(names));
    }
    const std::int64_t weights = weight_bytes(chain_);
    plan.bytes_by_owner = {{"weights", weights},
                           {"gradients", gradient_bytes_},
                           {"optimizer", request_.optimizer_bytes},
                           {"inputs", found.input_bytes},
                           {"activations", plan.schedule.peak_bytes},
                           {"other", std::max<std::int64_t>(0, resident_bytes_ - weights)}};
    plan.peak_by_phase = {{"forward", found.peaks.forward_bytes},
                          {"backward", found.peaks.backward_bytes},
                          {"update", found.peaks.update_bytes}};
    plan.profile_seconds = book_.seconds();
    if (request_.with_alternatives && request_.budget_bytes > 0) add_alternatives(plan);
    return plan;
  }

  void add_alternatives(RunPlan& plan) const {
    for (const std::int64_t budget : {request_.budget_bytes / 2, request_.budget_bytes * 2}) {
      RunPlan::Alternative alternative;
      alternative.budget_bytes = budget;
      try {
        const TrainingPlan found = make_plan(search_request(budget));
        alternative.fits = true;
        alternative.micro_batch = found.micro_batches.front().size;
        alternative.num_micro_batches = found.accumulation_steps;
        alternative.step_seconds = step_seconds(found);
        alternative.peak_bytes = found.peak_bytes;
      } catch (const BudgetError&) {
        alternative.fits = false;
      }
      plan.alternatives.push_back(alternative);
    }
  }

  const RunPlanRequest& request_;
  const Chain& chain_;
  ProfileBook& book_;
  std::int64_t resident_bytes_ =
      0;  // what is there now and stays: weights, buffers and whatever else lives
  std::int64_t gradient_bytes_ = 0;
  bool updates_in_backward_ = false;
  double time_ratio_ = 1.0;
};

// The plan of which nothing has to be known in advance.
RunPlan unmeasured_plan(const RunPlanRequest& request, const Chain& chain) {
  RunPlan plan;
  plan.global_batch = request.global_batch;
  plan.num_ranks = request.num_ranks;
  plan.micro_batch =
      request.fixed_micro_batch > 0 ? request.fixed_micro_batch : request.rank_batch();
  plan.num_micro_batches = divide_up(request.rank_batch(), plan.micro_batch);
  plan.operations_by_size[plan.micro_batch] = keep_everything(chain.size());
  return plan;
}

// The request itself, or for a chain that couples samples one whose micro-batch is the batch.
RunPlanRequest without_split(RunPlanRequest request, const Chain& chain) {
  if (chain.couples_samples()) request.fixed_micro_batch = request.global_batch;
  return request;
}

}  // namespace

const std::vector<Operation>& RunPlan::operations_for(std::int64_t num_samples) const {
  const auto found = operations_by_size.lower_bound(num_samples);
  if (found == operations_by_size.end())
    throw std::logic_error(fmt::format("no plan for a micro-batch of {}", num_samples));
  return found->second;
}

void check_split(const Chain& chain, std::int64_t micro_batch, std::int64_t global_batch,
                 std::int64_t num_ranks) {
  if (!chain.couples_samples()) return;
  if (num_ranks > 1) {
    throw ConfigError(
        fmt::format("{} ranks: the loss of this model compares the samples of a batch with each "
                    "other, so that ranks with "
                    "a share of the batch each would train another loss; train on one rank",
                    num_ranks));
  }
  if (micro_batch == 0 || micro_batch >= global_batch) return;
  throw ConfigError(
      fmt::format("micro-batches of {} in a global batch of {}: the loss of this model compares "
                  "the samples of a batch with each other, so that "
                  "accumulation would train another loss; leave out --gradient_accumulation_steps "
                  "and --per_device_train_batch_size (a "
                  "--memory_budget is met by recomputing), or choose a smaller --global_batch_size",
                  micro_batch, global_batch));
}

RunPlan plan_run(const RunPlanRequest& asked, const Chain& chain) {
  const RunPlanRequest request = without_split(asked, chain);
  if (request.budget_bytes == 0 && request.policy.empty()) return unmeasured_plan(request, chain);
  return BatchPlanner(request, chain).run();
}

std::int64_t smallest_budget(const RunPlanRequest& asked, const Chain& chain) {
  const RunPlanRequest request = without_split(asked, chain);
  return BatchPlanner(request, chain).floor();
}

}  // namespace headroom
