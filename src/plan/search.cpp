#include <headroom/plan/search.h>

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
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

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

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
  for (const StaticChoice& choice : request.choices) {
    for (const std::int64_t value :
         {choice.bytes.weights, choice.bytes.gradients, choice.bytes.optimizer, choice.bytes.slack,
          choice.optimizer_transient_bytes, choice.optimizer_ns, choice.max_accumulation_steps}) {
      if (value < 0 || value > kMaxChainBytes)
        throw ConfigError(
            fmt::format("static choice '{}': {} is out of range", choice.name, value));
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
        chain_(std::move(costs.chain)),
        options_(options) {
    validate(chain_);
    for (const StageCosts& stage : chain_.stages) {
      std::int64_t fastest = kMost;
      for (const StageOption& option : stage.options)
        fastest = std::min(fastest, option.forward_ns + option.backward_ns);
      least_time_ns += fastest;
    }
  }

  std::int64_t smallest_budget_bytes() {
    if (smallest_budget_bytes_ < 0)
      smallest_budget_bytes_ = ChainSolver(chain_, options_).smallest_budget_bytes();
    return smallest_budget_bytes_;
  }

  /// The fastest schedule, if one fits. Its table is not kept: a search meets many sizes, and the
  /// same size again only rarely.
  std::optional<Plan> plan(std::int64_t budget_bytes) {
    ChainSolver solver(chain_, options_);
    smallest_budget_bytes_ = solver.smallest_budget_bytes();
    if (smallest_budget_bytes_ > budget_bytes) return std::nullopt;
    return solver.plan(budget_bytes);
  }

  std::int64_t input_bytes;
  std::int64_t appearing_bytes;  ///< gradients at the end of backward
  std::int64_t least_time_ns = 0;

 private:
  ChainCosts chain_;
  SolverOptions options_;
  std::int64_t smallest_budget_bytes_ = -1;  ///< not known yet
};

struct Candidate {
  Split split;
  std::size_t choice;
  std::int64_t lower_bound_ns;
};

class Search {
 public:
  explicit Search(const PlanRequest& request) : request_(request) { check(request); }

  /// All pairs of split and choice, the most promising first.
  std::vector<Candidate> candidates() {
    std::vector<Candidate> result;
    for (const Split& split : splits_of(request_)) {
      for (std::size_t choice = 0; choice < request_.choices.size(); ++choice) {
        const std::int64_t max_steps = request_.choices[choice].max_accumulation_steps;
        if (max_steps > 0 && split.num_steps > max_steps) continue;
        result.push_back({split, choice, lower_bound_ns(split, choice)});
      }
    }
    if (result.empty())
      throw ConfigError(
          "no static choice allows so many accumulation steps; allow one without a limit on them");
    std::stable_sort(result.begin(), result.end(), [](const Candidate& a, const Candidate& b) {
      return a.lower_bound_ns < b.lower_bound_ns;
    });
    return result;
  }

  /// The best plan of one split and choice; nothing when it does not fit.
  std::optional<TrainingPlan> solve(const Candidate& candidate) {
    const StaticChoice& choice = request_.choices[candidate.choice];
    SizeCosts& large = costs(candidate.split.large, candidate.choice);
    const std::int64_t fixed_bytes = choice.bytes.total() + large.input_bytes;
    const std::int64_t chain_budget = request_.budget_bytes - fixed_bytes;
    TrainingPlan plan;
    plan.choice = candidate.choice;
    plan.accumulation_steps = candidate.split.num_steps;
    plan.input_bytes = large.input_bytes;
    plan.time_ns = choice.optimizer_ns;
    plan.peaks.update_bytes =
        fixed_bytes + large.appearing_bytes + choice.optimizer_transient_bytes;
    if (plan.peaks.update_bytes > request_.budget_bytes) return std::nullopt;
    const std::pair<std::int64_t, std::int64_t> groups[] = {
        {candidate.split.large, candidate.split.num_large},
        {candidate.split.large - 1, candidate.split.num_small()}};
    for (const auto& [size, count] : groups) {
      if (count == 0) continue;
      std::optional<Plan> schedule = costs(size, candidate.choice).plan(chain_budget);
      if (!schedule) return std::nullopt;
      plan.time_ns = plus(plan.time_ns, times(count, schedule->time_ns));
      plan.certified_gap_ns = plus(plan.certified_gap_ns, times(count, schedule->certified_gap_ns));
      for (std::size_t i = 0; i < schedule->curve.size(); ++i) {
        const bool backward = schedule->operations[i].kind == OperationKind::kBackward;
        std::int64_t& peak = backward ? plan.peaks.backward_bytes : plan.peaks.forward_bytes;
        peak = std::max(peak, fixed_bytes + schedule->curve[i].peak_bytes);
      }
      plan.micro_batches.push_back({size, count, *std::move(schedule)});
    }
    plan.peak_bytes =
        std::max({plan.peaks.forward_bytes, plan.peaks.backward_bytes, plan.peaks.update_bytes});
    return plan;
  }

  BudgetFloor floor_of(const Candidate& candidate) {
    const StaticChoice& choice = request_.choices[candidate.choice];
    SizeCosts& large = costs(candidate.split.large, candidate.choice);
    BudgetFloor floor;
    floor.choice = candidate.choice;
    floor.micro_batch_size = candidate.split.large;
    floor.static_bytes = choice.bytes;
    floor.input_bytes = large.input_bytes;
    floor.stage_bytes = large.smallest_budget_bytes();
    if (candidate.split.num_small() > 0) {
      floor.stage_bytes =
          std::max(floor.stage_bytes,
                   costs(candidate.split.large - 1, candidate.choice).smallest_budget_bytes());
    }
    floor.update_bytes = large.appearing_bytes + choice.optimizer_transient_bytes;
    floor.bytes =
        choice.bytes.total() + large.input_bytes + std::max(floor.stage_bytes, floor.update_bytes);
    return floor;
  }

 private:
  SizeCosts& costs(std::int64_t size, std::size_t choice) {
    const auto key = std::make_pair(size, choice);
    const auto found = costs_.find(key);
    if (found != costs_.end()) return found->second;
    return costs_
        .emplace(key, SizeCosts(request_.costs(size, request_.choices[choice]), request_.solver))
        .first->second;
  }

  std::int64_t lower_bound_ns(const Split& split, std::size_t choice) {
    std::int64_t bound = times(split.num_large, costs(split.large, choice).least_time_ns);
    if (split.num_small() > 0)
      bound = plus(bound, times(split.num_small(), costs(split.large - 1, choice).least_time_ns));
    return plus(bound, request_.choices[choice].optimizer_ns);
  }

  const PlanRequest& request_;
  std::map<std::pair<std::int64_t, std::size_t>, SizeCosts> costs_;
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
  const bool update_is_larger = floor.update_bytes > floor.stage_bytes;
  parts += update_is_larger ? fmt::format(", the update {}", format_bytes(floor.update_bytes))
                            : fmt::format(", one stage {}", format_bytes(floor.stage_bytes));
  parts += fmt::format(", inputs {}", format_bytes(floor.input_bytes));
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

TrainingPlan make_plan(const PlanRequest& request) {
  Search search(request);
  const std::vector<Candidate> candidates = search.candidates();
  std::optional<TrainingPlan> best;
  std::int64_t best_lower_bound_ns = kMost;
  int num_solved = 0;
  // Of equally fast plans the one with the fewest steps and the first choice wins, in whatever
  // order they were tried.
  const auto rank = [](const TrainingPlan& plan) {
    return std::make_tuple(plan.time_ns, plan.accumulation_steps, plan.choice);
  };
  for (const Candidate& candidate : candidates) {
    if (best && candidate.lower_bound_ns > best->time_ns) break;
    if (request.before_each) request.before_each();
    ++num_solved;
    std::optional<TrainingPlan> plan = search.solve(candidate);
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
