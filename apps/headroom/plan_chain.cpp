#include "plan_chain.h"

#include <headroom/config/chain_costs.h>
#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>
#include "core/figures.h"
#include "report/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

namespace headroom {
namespace {

constexpr std::size_t kMaxPictureColumns = 160;
constexpr std::size_t kMaxPictureRows = 64;
constexpr std::size_t kMaxTableRows = 400;

std::string format_ns(std::int64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns < 10'000) return fmt::format("{} ns", ns);
  if (ns < 10'000'000) return format_figure(value / 1e3) + " us";
  if (ns < 10'000'000'000) return format_figure(value / 1e6) + " ms";
  return format_figure(value / 1e9) + " s";
}

std::string format_name(const ChainCosts& chain, int format) {
  return format == 0 ? "full" : chain.boundary_formats[static_cast<std::size_t>(format - 1)].name;
}

bool is_forward(OperationKind kind) {
  return kind == OperationKind::kForward || kind == OperationKind::kForwardStore ||
         kind == OperationKind::kForwardKeep;
}

/// People and files count stages from 1.
int stage_number(const Operation& operation) { return operation.stage + 1; }

Json plan_as_json(const ChainCosts& chain, const Schedule& plan) {
  Json operations = Json::array();
  for (const Operation& operation : plan.operations) {
    Json entry = Json::object();
    entry.set("op", operation_name(operation.kind)).set("stage", stage_number(operation));
    if (operation.kind == OperationKind::kForwardKeep) entry.set("option", operation.option);
    const bool tells_format =
        operation.kind == OperationKind::kForwardStore ||
        (operation.kind == OperationKind::kForwardKeep && operation.format != 0);
    if (tells_format) entry.set("format", format_name(chain, operation.format));
    operations.push(entry);
  }
  Json json = Json::object();
  json.set("feasible", true)
      .set("time_ns", plan.time_ns)
      .set("peak_bytes", plan.peak_bytes)
      .set("certified_gap_ns", plan.certified_gap_ns);
  json.set("operations", operations);
  return json;
}

void print_table(const ChainCosts& chain, const Schedule& plan) {
  fmt::print("{:>5}  {:<13}  {:<20}  {:>6}  {:<8}  {:>12}  {:>12}\n", "", "operation", "stage",
             "option", "input", "peak", "live after");
  const std::size_t num_rows = std::min(plan.operations.size(), kMaxTableRows);
  for (std::size_t i = 0; i < num_rows; ++i) {
    const Operation& operation = plan.operations[i];
    const std::string& name = chain.stages[static_cast<std::size_t>(operation.stage)].name;
    const bool keeps = operation.kind == OperationKind::kForwardKeep;
    const bool stores =
        operation.kind == OperationKind::kForwardStore || (keeps && operation.format != 0);
    fmt::print("{:>5}  {:<13}  {:<20}  {:>6}  {:<8}  {:>12}  {:>12}{}\n", i + 1,
               operation_name(operation.kind), fmt::format("{} {}", stage_number(operation), name),
               keeps ? std::to_string(operation.option) : "",
               stores ? format_name(chain, operation.format) : "",
               format_bytes(plan.curve[i].peak_bytes), format_bytes(plan.curve[i].live_bytes),
               i == plan.peak_operation ? "  <- peak" : "");
  }
  if (num_rows < plan.operations.size())
    fmt::print("  ... and {} more operations: see --json\n", plan.operations.size() - num_rows);
}

/// One row per stage, one column per operation.
void print_picture(const ChainCosts& chain, const Schedule& plan) {
  const std::size_t num_stages = chain.stages.size(), num_operations = plan.operations.size();
  if (num_operations > kMaxPictureColumns || num_stages > kMaxPictureRows) {
    fmt::print("\n({} stages by {} operations are too many to draw)\n", num_stages, num_operations);
    return;
  }
  std::vector<std::string> rows(num_stages, std::string(num_operations, ' '));
  std::vector<bool> ran(num_stages, false), kept(num_stages, false);
  for (std::size_t i = 0; i < num_operations; ++i) {
    const auto s = static_cast<std::size_t>(plan.operations[i].stage);
    const OperationKind kind = plan.operations[i].kind;
    for (std::size_t l = 0; l < num_stages; ++l) rows[l][i] = kept[l] ? '-' : ' ';
    if (is_forward(kind)) {
      const bool keeps = kind == OperationKind::kForwardKeep;
      rows[s][i] = keeps ? (ran[s] ? 'R' : 'K') : (ran[s] ? 'r' : '>');
      ran[s] = true;
      kept[s] = keeps;
    } else if (kind == OperationKind::kBackward) {
      rows[s][i] = 'B';
      kept[s] = false;
    } else {
      rows[s][i] = 'x';
    }
  }
  std::size_t width = 5;
  for (const StageCosts& stage : chain.stages)
    width = std::max(width, std::min<std::size_t>(stage.name.size(), 20));
  fmt::print("\n{:<{}} |{:<{}}|\n", "stage", width, "operations in order", num_operations);
  for (std::size_t l = 0; l < num_stages; ++l)
    fmt::print("{:<{}} |{}|\n", chain.stages[l].name.substr(0, 20), width, rows[l]);
  fmt::print(
      "K kept   > swept, keeping nothing   R recomputed and kept   r swept again   - kept "
      "meanwhile   B backward   x input freed\n");
}

void print_plan(const ChainCosts& chain, const Schedule& plan, const std::string& policy) {
  print_table(chain, plan);
  print_picture(chain, plan);
  const Operation& peak = plan.operations[plan.peak_operation];
  const Recompute recompute = recompute_of(chain, plan.operations);
  fmt::print(
      "\npolicy {}: {} ({} ns), peak {} ({} bytes) at operation {} ({} of stage {}); {} forwards "
      "run again, {}% of one forward\n",
      policy, format_ns(plan.time_ns), plan.time_ns, format_bytes(plan.peak_bytes), plan.peak_bytes,
      plan.peak_operation + 1, operation_name(peak.kind), stage_number(peak), recompute.num_runs,
      format_figure(100 * recompute.fraction));
  if (plan.certified_gap_ns > 0) {
    fmt::print("no persistent schedule inside this budget is faster by more than {} ({}%)\n",
               format_ns(plan.certified_gap_ns),
               format_figure(100 * static_cast<double>(plan.certified_gap_ns) /
                             static_cast<double>(std::max<std::int64_t>(plan.time_ns, 1))));
  }
}

void print_frontier(const std::vector<FrontierPoint>& points, const PlanChainOptions& options) {
  if (options.json) {
    Json list = Json::array();
    for (const FrontierPoint& point : points) {
      Json entry = Json::object();
      entry.set("budget_bytes", point.budget_bytes)
          .set("time_ns", point.time_ns)
          .set("peak_bytes", point.peak_bytes);
      list.push(entry);
    }
    fmt::print("{}\n", list.dump(-1));
    return;
  }
  if (options.csv) {
    fmt::print("budget_bytes,time_ns,peak_bytes\n");
    for (const FrontierPoint& point : points)
      fmt::print("{},{},{}\n", point.budget_bytes, point.time_ns, point.peak_bytes);
    return;
  }
  fmt::print("{:>20}  {:>12}  {:>12}  {:>8}\n", "budget (bytes)", "", "time", "slower");
  for (const FrontierPoint& point : points) {
    const double fastest = static_cast<double>(std::max<std::int64_t>(points.back().time_ns, 1));
    fmt::print("{:>20}  {:>12}  {:>12}  {:>7}%\n", point.budget_bytes,
               format_bytes(point.budget_bytes), format_ns(point.time_ns),
               format_figure(100 * (static_cast<double>(point.time_ns) / fastest - 1)));
  }
}

int report_infeasible(const PlanChainOptions& options, std::int64_t budget_bytes,
                      std::int64_t smallest_bytes) {
  if (options.json) {
    Json json = Json::object();
    json.set("feasible", false).set("smallest_budget_bytes", smallest_bytes);
    fmt::print("{}\n", json.dump(-1));
  } else {
    fmt::print(stderr,
               "budget {} ({} bytes) is below the {} ({} bytes) that policy {} needs for this "
               "chain; raise --memory_budget{}\n",
               format_bytes(budget_bytes), budget_bytes, format_bytes(smallest_bytes),
               smallest_bytes, options.policy,
               options.policy == "optimal" ? "" : " or choose --policy optimal");
  }
  return static_cast<int>(ExitCode::kBudget);
}

}  // namespace

int run_plan_chain(const PlanChainOptions& options) {
  const Policy policy = parse_policy(options.policy);
  if (options.csv && (options.json || !options.frontier))
    throw ConfigError("--csv prints the frontier: give --frontier with it, and not --json");
  const std::int64_t budget_bytes = options.memory_budget.empty()
                                        ? std::numeric_limits<std::int64_t>::max()
                                        : parse_bytes(options.memory_budget);
  ChainCosts chain = read_chain_file(options.chain_path);

  if (policy.kind != PolicyKind::kOptimal) {
    const Schedule plan = schedule_of_policy(chain, policy);
    if (options.frontier) {
      print_frontier({{plan.peak_bytes, plan.time_ns, plan.peak_bytes}}, options);
      return static_cast<int>(ExitCode::kDone);
    }
    if (plan.peak_bytes > budget_bytes)
      return report_infeasible(options, budget_bytes, plan.peak_bytes);
    options.json ? fmt::print("{}\n", plan_as_json(chain, plan).dump(-1))
                 : print_plan(chain, plan, options.policy);
    return static_cast<int>(ExitCode::kDone);
  }

  ChainSolver solver(std::move(chain));
  if (options.frontier) {
    print_frontier(solver.frontier(), options);
    if (!solver.frontier_is_exact())
      fmt::print(stderr,
                 "the sizes have too small a common divisor for an exact curve: between these "
                 "points others may exist\n");
    return static_cast<int>(ExitCode::kDone);
  }
  if (budget_bytes < solver.smallest_budget_bytes())
    return report_infeasible(options, budget_bytes, solver.smallest_budget_bytes());
  const Schedule plan = solver.schedule(budget_bytes);
  options.json ? fmt::print("{}\n", plan_as_json(solver.chain(), plan).dump(-1))
               : print_plan(solver.chain(), plan, options.policy);
  return static_cast<int>(ExitCode::kDone);
}

}  // namespace headroom
