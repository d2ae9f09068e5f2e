#include <headroom/plan/search.h>

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include "core/integers.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace headroom {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::int64_t times(std::int64_t count, std::int64_t value) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(count, value, &product) ? kMost : product;
}

std::int64_t plus(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kMost : sum;
}

/// num_samples as `num_steps` micro-batches whose sizes differ by at most one.
struct Split {
  std::int64_t num_steps;
  std::int64_t large;
  std::int64_t num_large;

  std::int64_t num_small() const { return num_steps - num_large; }
};

Split balanced_split(std::int64_t num_samples, std::int64_t num_steps) {
  const std::int64_t rest = num_samples % num_steps;
  return {num_steps, num_samples / num_steps + (rest > 0 ? 1 : 0), rest > 0 ? rest : num_steps};
}

/// The splits to look at. Of those with the same largest micro-batch only the one with the fewest
/// steps.
std::vector<Split> splits_of(const PlanRequest& request) {
  if (request.accumulation_steps > 0)
    return {balanced_split(request.num_samples, request.accumulation_steps)};
  if (request.micro_batch_size > 0)
    return {balanced_split(request.num_samples,
                           divide_up(request.num_samples, request.micro_batch_size))};
  std::vector<Split> splits;
  for (std::int64_t num_steps = 1; num_steps <= request.num_samples;) {
    const Split split = balanced_split(request.num_samples, num_steps);
    splits.push_back(split);
    if (split.large == 1) break;
    num_steps = divide_up(request.num_samples, split.large - 1);
  }
  return splits;
}

void check(const PlanRequest& request) {
  if (request.num_samples < 1)
    throw ConfigError(
        fmt::format("the global batch has {} samples; it needs at least one", request.num_samples));
  if (request.micro_batch_size < 0 || request.accumulation_steps < 0)
    throw ConfigError("micro-batch size and accumulation steps must not be negative");
  if (request.accumulation_steps > request.num_samples) {
    throw ConfigError(fmt::format("{} accumulation steps cannot share {} samples; use fewer steps",
                                  request.accumulation_steps, request.num_samples));
  }
  if (request.accumulation_steps > 0 && request.micro_batch_size > 0 &&
      divide_up(request.num_samples, request.accumulation_steps) > request.micro_batch_size) {
    throw ConfigError(
        fmt::format("{} accumulation steps of at most {} samples do not make a global batch of {}",
                    request.accumulation_steps, request.micro_batch_size, request.num_samples));
  }
  if (request.choices.empty() || !request.costs)
    throw ConfigError(
        "the planner needs at least one static choice and the costs of a micro-batch");
  for (std::size_t i = 0; i < request.choices.size(); ++i) {
    const StaticChoice& choice = request.choices[i];
    for (const std::int64_t value :
         {choice.bytes.weights, choice.bytes.gradients, choice.bytes.optimizer, choice.bytes.slack,
          choice.optimizer_transient_bytes, choice.optimizer_ns, choice.max_accumulation_steps}) {
      if (value < 0 || value > kMaxChainBytes)
        throw ConfigError(fmt::format("static choice {}: {} is out of range", i, value));
    }
  }
}

std::int64_t appearing_gradients(const ChainCosts& chain) {
  std::int64_t bytes = chain.input_grad_bytes;
  for (const StageCosts& stage : chain.stages) bytes += stage.param_grad_bytes;
  return bytes;
}

/// Everything about micro-batches of one size under one choice, worked out as far as it is needed.
class SizeCosts {
 public:
  SizeCosts(MicroBatchCosts costs, const SolverOptions& options)
      : input_bytes(costs.input_bytes),
        appearing_bytes(appearing_gradients(costs.chain)),
        prepare_ns(costs.prepare_ns),
        prepare_bytes(costs.prepare_bytes),
        least_time_ns(costs.prepare_ns),
        chain_(std::move(costs.chain)),
        options_(options) {
    validate(chain_);
    for (const StageCosts& stage : chain_.stages) {
      std::int64_t fastest = kMost;
      for (const StageOption& option : stage.options) {
        if (option.fits) fastest = std::min(fastest, option.forward_ns + option.backward_ns);
      }
      least_time_ns = plus(least_time_ns, fastest);
    }
  }

  std::int64_t smallest_budget_bytes() {
    if (!smallest_budget_bytes_)
      smallest_budget_bytes_ = ChainSolver(chain_, options_).smallest_budget_bytes();
    return *smallest_budget_bytes_;
  }

  /// The fastest schedule, if one fits. Its table is not kept: a search meets many sizes, and the
  /// same size again only rarely.
  std::optional<Schedule> schedule(std::int64_t budget_bytes) {
    ChainSolver solver(chain_, options_);
    smallest_budget_bytes_ = solver.smallest_budget_bytes();
    if (*smallest_budget_bytes_ > budget_bytes) return std::nullopt;
    return solver.schedule(budget_bytes);
  }

  const ChainCosts& chain() const { return chain_; }

  std::int64_t input_bytes;
  std::int64_t appearing_bytes;  ///< gradients at the end of backward
  std::int64_t prepare_ns;
  std::int64_t prepare_bytes;
  std::int64_t least_time_ns;

 private:
  ChainCosts chain_;
  SolverOptions options_;
  std::optional<std::int64_t> smallest_budget_bytes_;  ///< nothing: not known yet
};

struct Candidate {
  Split split;
  std::size_t choice;
  std::int64_t lower_bound_ns;
};

class Search {
 public:
  explicit Search(const PlanRequest& request) : request_(request) { check(request); }

  /// All pairs of split and choice that may fit, the most promising first.
  std::vector<Candidate> candidates() {
    std::vector<Candidate> result;
    bool any_allowed = false;
    for (const Split& split : splits_of(request_)) {
      for (std::size_t choice = 0; choice < request_.choices.size(); ++choice) {
        if (!allows(request_.choices[choice], split.num_steps)) continue;
        any_allowed = true;
        if (const auto bound = lower_bound_ns(split, choice))
          result.push_back({split, choice, *bound});
      }
    }
    if (!any_allowed)
      throw ConfigError(
          "no static choice allows so many accumulation steps; allow one without a limit on them");
    if (result.empty())
      throw BudgetError(
          "no micro-batch of the sizes to choose from fits; raise --memory_budget or let "
          "micro-batches be smaller");
    std::stable_sort(result.begin(), result.end(), [](const Candidate& a, const Candidate& b) {
      return a.lower_bound_ns < b.lower_bound_ns;
    });
    return result;
  }

  /// The best plan of one split and choice; nothing when it does not fit.
  std::optional<BatchPlan> solve(const Candidate& candidate) {
    const SizeCosts& large = *costs(candidate.split.large, candidate.choice);
    BatchPlan plan = start_plan(candidate.choice, candidate.split.num_steps, large);
    if (plan.peak_bytes > request_.budget_bytes) return std::nullopt;
    const std::int64_t chain_budget = request_.budget_bytes -
                                      request_.choices[candidate.choice].bytes.total() -
                                      large.input_bytes;
    const std::pair<std::int64_t, std::int64_t> groups[] = {
        {candidate.split.large, candidate.split.num_large},
        {candidate.split.large - 1, candidate.split.num_small()}};
    for (const auto& [size, count] : groups) {
      if (count == 0) continue;
      std::optional<Schedule> schedule = costs(size, candidate.choice)->schedule(chain_budget);
      if (!schedule) return std::nullopt;
      plan.time_ns = plus(plan.time_ns, times(count, costs(size, candidate.choice)->prepare_ns));
      add({size, count, *std::move(schedule)}, plan);
    }
    return plan;
  }

  /// The plan of a fixed policy, whatever the budget.
  BatchPlan solve_by(const Policy& policy) {
    const std::int64_t size =
        request_.micro_batch_size > 0 ? request_.micro_batch_size : request_.num_samples;
    const std::int64_t num_steps = divide_up(request_.num_samples, size);
    std::size_t choice = 0;
    while (choice < request_.choices.size() && !allows(request_.choices[choice], num_steps))
      ++choice;
    if (choice == request_.choices.size())
      throw ConfigError(fmt::format("no static choice allows {} accumulation steps", num_steps));
    const SizeCosts* found = costs(size, choice);
    if (found == nullptr || !first_options_fit(found->chain())) {
      throw BudgetError(
          fmt::format("{} does not fit at a micro-batch of {}; use a smaller micro-batch",
                      policy.to_string(), size));
    }
    BatchPlan plan = start_plan(choice, num_steps, *found);
    plan.time_ns = plus(plan.time_ns, times(num_steps, found->prepare_ns));
    add({size, num_steps, schedule_of_policy(found->chain(), policy)}, plan);
    return plan;
  }

  BudgetFloor floor_of(const Candidate& candidate) {
    const StaticChoice& choice = request_.choices[candidate.choice];
    SizeCosts& large = *costs(candidate.split.large, candidate.choice);
    BudgetFloor floor;
    floor.choice = candidate.choice;
    floor.micro_batch_size = candidate.split.large;
    floor.static_bytes = choice.bytes;
    floor.input_bytes = large.input_bytes;
    floor.stage_bytes = large.smallest_budget_bytes();
    if (candidate.split.num_small() > 0) {
      floor.stage_bytes =
          std::max(floor.stage_bytes,
                   costs(candidate.split.large - 1, candidate.choice)->smallest_budget_bytes());
    }
    floor.update_bytes = large.appearing_bytes + choice.optimizer_transient_bytes;
    floor.prepare_bytes =
        std::max<std::int64_t>(0, prepare_bytes(candidate.choice, large) - choice.bytes.total());
    floor.bytes = choice.bytes.total() + std::max({floor.input_bytes + floor.stage_bytes,
                                                   floor.update_bytes, floor.prepare_bytes});
    return floor;
  }

 private:
  static bool allows(const StaticChoice& choice, std::int64_t num_steps) {
    return choice.max_accumulation_steps == 0 || num_steps <= choice.max_accumulation_steps;
  }

  static bool first_options_fit(const ChainCosts& chain) {
    return std::all_of(chain.stages.begin(), chain.stages.end(),
                       [](const StageCosts& stage) { return stage.options.front().fits; });
  }

  /// Of everything, while micro-batches are prepared; 0 where none is.
  std::int64_t prepare_bytes(std::size_t index, const SizeCosts& large) const {
    const StaticBytes& bytes = request_.choices[index].bytes;
    return large.prepare_bytes > 0 ? bytes.total() - bytes.gradients + large.prepare_bytes : 0;
  }

  BatchPlan start_plan(std::size_t index, std::int64_t num_steps, const SizeCosts& large) const {
    const StaticChoice& choice = request_.choices[index];
    BatchPlan plan;
    plan.choice = index;
    plan.gradients = choice.gradients;
    plan.accumulation_steps = num_steps;
    plan.input_bytes = large.input_bytes;
    plan.time_ns = choice.optimizer_ns;
    plan.peaks.update_bytes =
        choice.bytes.total() + large.appearing_bytes + choice.optimizer_transient_bytes;
    plan.peaks.forward_bytes = prepare_bytes(index, large);
    plan.peak_bytes = plan.peaks.largest();
    return plan;
  }

  void add(PlannedMicroBatches part, BatchPlan& plan) const {
    const Schedule& schedule = part.schedule;
    const std::int64_t fixed_bytes = request_.choices[plan.choice].bytes.total() + plan.input_bytes;
    plan.time_ns = plus(plan.time_ns, times(part.count, schedule.time_ns));
    plan.certified_gap_ns =
        plus(plan.certified_gap_ns, times(part.count, schedule.certified_gap_ns));
    for (std::size_t i = 0; i < schedule.curve.size(); ++i) {
      const bool backward = schedule.operations[i].kind == OperationKind::kBackward;
      std::int64_t& peak = backward ? plan.peaks.backward_bytes : plan.peaks.forward_bytes;
      peak = std::max(peak, fixed_bytes + schedule.curve[i].peak_bytes);
    }
    plan.peak_bytes = plan.peaks.largest();
    plan.micro_batches.push_back(std::move(part));
  }

  /// Null when a micro-batch of this size is known not to fit.
  SizeCosts* costs(std::int64_t size, std::size_t choice) {
    const auto key = std::make_pair(size, choice);
    auto found = costs_.find(key);
    if (found == costs_.end()) {
      std::optional<MicroBatchCosts> given = request_.costs(size, request_.choices[choice]);
      std::optional<SizeCosts> made;
      if (given) made.emplace(*std::move(given), request_.solver);
      found = costs_.emplace(key, std::move(made)).first;
    }
    return found->second ? &*found->second : nullptr;
  }

  /// Nothing when a size is known not to fit.
  std::optional<std::int64_t> lower_bound_ns(const Split& split, std::size_t choice) {
    const SizeCosts* large = costs(split.large, choice);
    const SizeCosts* small = split.num_small() > 0 ? costs(split.large - 1, choice) : large;
    if (large == nullptr || small == nullptr) return std::nullopt;
    return plus(plus(times(split.num_large, large->least_time_ns),
                     times(split.num_small(), small->least_time_ns)),
                request_.choices[choice].optimizer_ns);
  }

  const PlanRequest& request_;
  std::map<std::pair<std::int64_t, std::size_t>, std::optional<SizeCosts>> costs_;
};

BudgetFloor least_floor(Search& search, const std::vector<Candidate>& candidates,
                        const std::function<void()>& before_each) {
  std::optional<BudgetFloor> least;
  for (const Candidate& candidate : candidates) {
    if (before_each) before_each();
    const BudgetFloor floor = search.floor_of(candidate);
    if (!least || floor.bytes < least->bytes) least = floor;
  }
  return *least;
}

/// A micro-batch of one sample is a remedy that the planner knows itself, where the user had fixed
/// a larger one.
void add_own_remedy(const PlanRequest& request, const BudgetFloor& floor,
                    std::vector<Remedy>& remedies) {
  if (floor.micro_batch_size <= 1) return;
  PlanRequest freed = request;
  freed.micro_batch_size = 0;
  freed.accumulation_steps = 0;
  const BudgetFloor lower = find_floor(freed);
  if (lower.bytes < floor.bytes) {
    remedies.insert(
        remedies.begin(),
        {fmt::format("let micro-batches of {} {} do (now {})", lower.micro_batch_size,
                     lower.micro_batch_size == 1 ? "sample" : "samples", floor.micro_batch_size),
         floor.bytes - lower.bytes});
  }
}

std::string floor_message(const PlanRequest& request, const BudgetFloor& floor) {
  std::string parts = fmt::format(
      "weights {}, gradients {}, optimizer {}", format_bytes(floor.static_bytes.weights),
      format_bytes(floor.static_bytes.gradients), format_bytes(floor.static_bytes.optimizer));
  const std::int64_t stage_bytes = floor.stage_bytes + floor.input_bytes;
  if (floor.prepare_bytes > std::max(stage_bytes, floor.update_bytes)) {
    parts += fmt::format(", comparing all samples {}", format_bytes(floor.prepare_bytes));
  } else if (floor.update_bytes > stage_bytes) {
    parts += fmt::format(", the update {}", format_bytes(floor.update_bytes));
  } else {
    parts += fmt::format(", one stage {}, inputs {}", format_bytes(floor.stage_bytes),
                         format_bytes(floor.input_bytes));
  }
  if (floor.static_bytes.slack > 0)
    parts += fmt::format(", slack {}", format_bytes(floor.static_bytes.slack));
  std::vector<Remedy> remedies = request.remedies;
  add_own_remedy(request, floor, remedies);
  std::string text = fmt::format(
      "budget {} is below the {} floor ({}); raise --memory_budget to at least {} bytes",
      format_bytes(request.budget_bytes), format_bytes(floor.bytes), parts, floor.bytes);
  for (const Remedy& remedy : remedies)
    text += fmt::format(", or {} (saves {})", remedy.change, format_bytes(remedy.saved_bytes));
  return text;
}

}  // namespace

BatchPlan make_plan(const PlanRequest& request) {
  Search search(request);
  const std::vector<Candidate> candidates = search.candidates();
  std::optional<BatchPlan> best;
  std::int64_t best_lower_bound_ns = kMost;
  int num_solved = 0;
  // Of equally fast plans the one with the fewest steps and the first choice wins, in whatever
  // order they were tried.
  const auto rank = [](const BatchPlan& plan) {
    return std::make_tuple(plan.time_ns, plan.accumulation_steps, plan.choice);
  };
  for (const Candidate& candidate : candidates) {
    if (best && candidate.lower_bound_ns > best->time_ns) break;
    if (request.before_each) request.before_each();
    ++num_solved;
    std::optional<BatchPlan> plan = search.solve(candidate);
    if (!plan) continue;
    best_lower_bound_ns = std::min(best_lower_bound_ns, plan->time_ns - plan->certified_gap_ns);
    if (!best || rank(*plan) < rank(*best)) best = std::move(plan);
  }
  if (!best)
    throw BudgetError(floor_message(request, least_floor(search, candidates, request.before_each)));
  best->certified_gap_ns = best->time_ns - best_lower_bound_ns;
  best->num_candidates = static_cast<int>(candidates.size());
  best->num_solved = num_solved;
  return *std::move(best);
}

BatchPlan make_policy_plan(const PlanRequest& request, const Policy& policy) {
  return Search(request).solve_by(policy);
}

const std::vector<Operation>& BatchPlan::operations_for(std::int64_t num_samples) const {
  const PlannedMicroBatches* best = nullptr;
  for (const PlannedMicroBatches& part : micro_batches) {
    if (part.size >= num_samples && (best == nullptr || part.size < best->size)) best = &part;
  }
  if (best == nullptr)
    throw std::logic_error(fmt::format("no plan for a micro-batch of {}", num_samples));
  return best->schedule.operations;
}

BudgetFloor find_floor(const PlanRequest& request) {
  Search search(request);
  return least_floor(search, search.candidates(), request.before_each);
}

ChainCosts with_gradients_allocated(ChainCosts chain) {
  for (StageCosts& stage : chain.stages) stage.param_grad_bytes = 0;
  return chain;
}

ChainCosts with_update_in_backward(ChainCosts chain) {
  for (StageCosts& stage : chain.stages) {
    for (StageOption& option : stage.options)
      option.backward_transient_bytes += stage.param_grad_bytes;
    stage.param_grad_bytes = 0;
  }
  return chain;
}

}  // namespace headroom
