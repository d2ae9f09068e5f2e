#include "plan/grouped_chain.h"

#include "plan/segments.h"
#include "plan/simulate.h"

#include <headroom/plan/chain_solver.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace headroom {
namespace {

/// Where between a group's floor and its ample budget its options lie.
constexpr double kOptionBudgets[] = {0, 0.1, 0.25, 0.5, 1};

/// A group has a few stages: its own tables are small, and fine enough with little work.
constexpr std::int64_t kGroupSlots = 256, kGroupWork = 200'000;

ChainCosts part_of(const ChainCosts& chain, int first, int num_stages) {
  ChainCosts part;
  const auto begin = chain.stages.begin() + first;
  part.stages.assign(begin, begin + num_stages);
  part.input_grad_bytes = first == 0 ? chain.input_grad_bytes : (begin - 1)->grad_bytes;
  return part;
}

/// What running the stages one after the other needs beyond the last one's output.
std::int64_t sweep_transient_bytes(const ChainCosts& part) {
  std::int64_t widest = 0, input_bytes = 0;
  for (const StageCosts& stage : part.stages) {
    widest = std::max(widest, input_bytes + stage.output_bytes + stage.forward_transient_bytes);
    input_bytes = stage.output_bytes;
  }
  return widest - part.stages.back().output_bytes;
}

std::int64_t time_ns(const ChainCosts& part, const std::vector<Operation>& operations) {
  std::int64_t total = 0;
  for (const Operation& operation : operations) {
    const StageCosts& stage = part.stages[static_cast<std::size_t>(operation.stage)];
    const StageOption& option = stage.options[static_cast<std::size_t>(operation.option)];
    if (operation.kind == OperationKind::kFree) continue;
    total += operation.kind == OperationKind::kBackward      ? option.backward_ns
             : operation.kind == OperationKind::kForwardKeep ? option.forward_ns
                                                             : stage.forward_ns;
  }
  return total;
}

std::int64_t highest_peak(const std::vector<OperationBytes>& curve, std::size_t begin,
                          std::size_t end) {
  std::int64_t peak = 0;
  for (std::size_t i = begin; i < end; ++i) peak = std::max(peak, curve[i].peak_bytes);
  return peak;
}

/// The numbers of a group that runs by `schedule`, whose backward begins at operation `turn`.
StageOption option_costs(const ChainCosts& part, const Schedule& schedule, std::size_t turn,
                         std::int64_t forward_ns) {
  const StageCosts& last = part.stages.back();
  std::int64_t param_grad_bytes = 0;
  for (const StageCosts& stage : part.stages) param_grad_bytes += stage.param_grad_bytes;
  const std::int64_t live = schedule.curve[turn - 1].live_bytes;
  StageOption option;
  option.kept_bytes = live - last.grad_bytes;
  option.forward_ns = forward_ns;
  option.backward_ns = schedule.time_ns - forward_ns;
  option.forward_transient_bytes =
      std::max<std::int64_t>(0, highest_peak(schedule.curve, 0, turn) - live);
  option.backward_transient_bytes =
      std::max<std::int64_t>(0, highest_peak(schedule.curve, turn, schedule.curve.size()) - live -
                                    part.input_grad_bytes - param_grad_bytes);
  return option;
}

}  // namespace

GroupedChain::GroupedChain(ChainCosts chain, int num_groups) : chain_(std::move(chain)) {
  const auto num_stages = static_cast<std::int64_t>(chain_.stages.size());
  groups_.input_grad_bytes = chain_.input_grad_bytes;
  groups_.boundary_formats = chain_.boundary_formats;
  for (int group = 0; group < num_groups; ++group) {
    const std::int64_t first = segment_begin(num_stages, num_groups, group);
    const std::int64_t end = segment_begin(num_stages, num_groups, group + 1);
    add_group(static_cast<int>(first), static_cast<int>(end - first));
  }
}

void GroupedChain::add_group(int first, int num_stages) {
  const ChainCosts part = part_of(chain_, first, num_stages);
  const StageCosts& last = part.stages.back();
  StageCosts costs;
  costs.output_bytes = last.output_bytes;
  costs.grad_bytes = last.grad_bytes;
  costs.forward_transient_bytes = sweep_transient_bytes(part);
  for (const StageCosts& stage : part.stages) {
    costs.forward_ns += stage.forward_ns;
    costs.param_grad_bytes += stage.param_grad_bytes;
  }
  Group group{first, num_stages, {}};
  SolverOptions options;
  options.max_slots = kGroupSlots;
  options.max_lossless_work = kGroupWork;
  ChainSolver solver(part, options);
  const std::int64_t floor = solver.smallest_budget_bytes();
  const std::int64_t room = solver.ample_budget_bytes() - floor;
  for (const double share : kOptionBudgets) {
    const Schedule schedule =
        solver.schedule(floor + std::llround(share * static_cast<double>(room)));
    const auto begin = schedule.operations.begin();
    const auto turn = std::find_if(
        begin, schedule.operations.end(),
        [](const Operation& operation) { return operation.kind == OperationKind::kBackward; });
    Option option{{begin, turn}, {turn, schedule.operations.end()}};
    // A group's schedule finds its input held; in the chain it may be the head, and is stored
    // first.
    if (option.forward.front().kind == OperationKind::kForward)
      option.forward.front().kind = OperationKind::kForwardStore;
    costs.options.push_back(option_costs(part, schedule, static_cast<std::size_t>(turn - begin),
                                         time_ns(part, option.forward)));
    group.options.push_back(std::move(option));
  }
  groups_.stages.push_back(std::move(costs));
  parts_.push_back(std::move(group));
}

std::vector<Operation> GroupedChain::expand(const std::vector<Operation>& operations) const {
  std::vector<Operation> result;
  for (const Operation& operation : operations) {
    const Group& group = parts_[static_cast<std::size_t>(operation.stage)];
    const int first = group.first;
    const Option& option = group.options[static_cast<std::size_t>(operation.option)];
    const auto append = [&](const std::vector<Operation>& inside) {
      for (Operation inner : inside) {
        if (inner.stage == 0) inner.format = operation.format;
        inner.stage += first;
        result.push_back(inner);
      }
    };
    switch (operation.kind) {
      case OperationKind::kForward:
      case OperationKind::kForwardStore:
        result.push_back({operation.kind, first, 0, operation.format});
        for (int l = first + 1; l < first + group.num_stages; ++l)
          result.push_back({OperationKind::kForward, l, 0, 0});
        break;
      case OperationKind::kForwardKeep:
        append(option.forward);
        break;
      case OperationKind::kBackward:
        append(option.backward);
        break;
      case OperationKind::kFree:
        result.push_back({OperationKind::kFree, first, 0, operation.format});
        break;
    }
  }
  return result;
}

namespace {

/// Keeping more of a stage: what it costs and what it saves.
struct Upgrade {
  std::int64_t bytes;
  std::int64_t saved_ns;

  bool pays_more_than(const Upgrade& other) const {
    return static_cast<long double>(saved_ns) * static_cast<long double>(other.bytes) >
           static_cast<long double>(other.saved_ns) * static_cast<long double>(bytes);
  }
};

/// The steps from keeping nothing of a stage to keeping its fastest option, each of which pays less
/// per byte than the one before (the lower convex hull of bytes and time).
void add_upgrades(const StageCosts& stage, std::int64_t without_ns,
                  std::vector<Upgrade>& upgrades) {
  std::int64_t bytes = 0, time_ns = without_ns;
  while (true) {
    std::optional<Upgrade> best;
    for (const StageOption& option : stage.options) {
      const Upgrade step{option.kept_bytes - bytes,
                         time_ns - option.forward_ns - option.backward_ns};
      if (option.fits && step.saved_ns > 0 && (!best || step.pays_more_than(*best))) best = step;
    }
    if (!best) return;
    upgrades.push_back(*best);
    bytes += best->bytes;
    time_ns -= best->saved_ns;
  }
}

}  // namespace

std::int64_t least_time_within(const ChainCosts& chain, std::int64_t budget_bytes) {
  std::int64_t total_ns = 0;
  std::vector<Upgrade> upgrades;
  for (const StageCosts& stage : chain.stages) {
    std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
    for (const StageOption& option : stage.options)
      if (option.fits) least_ns = std::min(least_ns, option.forward_ns + option.backward_ns);
    total_ns += stage.forward_ns + least_ns;
    add_upgrades(stage, stage.forward_ns + least_ns, upgrades);
  }
  std::sort(upgrades.begin(), upgrades.end(),
            [](const Upgrade& a, const Upgrade& b) { return a.pays_more_than(b); });
  std::int64_t left_bytes = budget_bytes;
  for (const Upgrade& upgrade : upgrades) {
    if (upgrade.bytes > left_bytes) {
      total_ns -= static_cast<std::int64_t>(std::ceil(static_cast<long double>(upgrade.saved_ns) *
                                                      static_cast<long double>(left_bytes) /
                                                      static_cast<long double>(upgrade.bytes)));
      break;
    }
    left_bytes -= upgrade.bytes;
    total_ns -= upgrade.saved_ns;
  }
  return total_ns;
}

}  // namespace headroom
