// How a run's plan is shown, to people and to machines.
#include <headroom/train/run_plan.h>

#include <headroom/core/bytes.h>
#include "core/figures.h"
#include "report/json.h"
#include "report/table.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

namespace headroom {
namespace {

constexpr std::pair<PageKind, const char*> kPageNames[] = {{PageKind::kWeights, "weights"},
                                                           {PageKind::kGradients, "gradients"},
                                                           {PageKind::kState, "optimizer"}};

struct StageDecision {
  int num_forwards = 0;
  int option = -1;             // of the run that backward uses
  int output_format = 0;       // in which the stage's output is held
  std::int64_t format_ns = 0;  // of storing it and of reading it back
};

const Schedule& schedule_of(const RunPlan& plan) { return plan.batch.largest().schedule; }

std::vector<std::pair<const char*, std::int64_t>> phases_of(const RunPlan& plan) {
  const PhasePeaks& peaks = plan.batch.peaks;
  return {{"backward", peaks.backward_bytes},
          {"forward", peaks.forward_bytes},
          {"update", peaks.update_bytes}};
}

const BoundaryFormat& format_of(const RunPlan& plan, int format) {
  return plan.costs.boundary_formats[static_cast<std::size_t>(format - 1)];
}

std::vector<StageDecision> decisions(const RunPlan& plan) {
  std::vector<StageDecision> result(plan.costs.stages.size());
  std::vector<bool> is_stored(plan.costs.stages.size() + 1);  // by boundary, in another format
  for (const Operation& operation : schedule_of(plan).operations) {
    const auto input = static_cast<std::size_t>(operation.stage);
    if (operation.kind == OperationKind::kFree) is_stored[input] = false;
    if (operation.format != 0 && operation.kind != OperationKind::kFree && input > 0) {
      StageDecision& before = result[input - 1];
      const BoundaryFormat& format = format_of(plan, operation.format);
      const std::int64_t bytes = plan.costs.stages[input - 1].output_bytes;
      before.output_format = operation.format;
      if (!is_stored[input])
        before.format_ns += format.encode_ns(bytes, plan.costs.stages[input].forward_ns);
      before.format_ns += format.decode_ns(bytes);
      is_stored[input] = true;
    }
    if (operation.kind == OperationKind::kBackward || operation.kind == OperationKind::kFree)
      continue;
    StageDecision& decision = result[input];
    ++decision.num_forwards;
    if (operation.kind == OperationKind::kForwardKeep) decision.option = operation.option;
  }
  return result;
}

// "recompute x1, keep mlp", and what happens to the output where it does not stay as it is.
std::string decision_text(const RunPlan& plan, std::size_t stage, const StageDecision& decision) {
  std::string text =
      plan.option_names[stage][static_cast<std::size_t>(std::max(decision.option, 0))];
  if (decision.num_forwards > 1) {
    text = fmt::format("recompute x{}{}", decision.num_forwards - 1,
                       decision.option > 0 ? ", " + text : "");
  }
  if (decision.output_format == 0) return text;
  const std::string& format = format_of(plan, decision.output_format).name;
  return text + (format == "disk" ? ", spill" : ", compress (" + format + ")");
}

std::int64_t extra_ns(const StageCosts& costs, const StageDecision& decision) {
  const StageOption& option = costs.options[static_cast<std::size_t>(std::max(decision.option, 0))];
  const StageOption& plain = costs.options.front();
  return (decision.num_forwards - 1) * costs.forward_ns + (option.forward_ns + option.backward_ns) -
         (plain.forward_ns + plain.backward_ns) + decision.format_ns;
}

std::string format_name(const RunPlan& plan, int format) {
  return format == 0 ? "full" : format_of(plan, format).name;
}

const char* phase_of(const Operation& operation) {
  return operation.kind == OperationKind::kBackward ? "backward" : "forward";
}

template <typename Pairs>
Json bytes_json(const Pairs& bytes_by_name) {
  Json json = Json::object();
  for (const auto& [name, bytes] : bytes_by_name) json.set(name, bytes);
  return json;
}

// "weights 1.00 MiB, gradients 1.00 MiB"
template <typename Pairs>
std::string bytes_text(const Pairs& bytes_by_name) {
  std::string text;
  for (const auto& [name, bytes] : bytes_by_name)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, format_bytes(bytes));
  return text;
}

std::string update_time_text(UpdateTime updates) {
  switch (updates) {
    case UpdateTime::kInBackward:
      return "in backward";
    case UpdateTime::kInNextForward:
      return "in the next forward";
    case UpdateTime::kAfterBackward:
      break;
  }
  return "after backward";
}

Json paging_json(const PagingPlan& paging) {
  Json units = Json::array();
  for (std::size_t i = 0; i < paging.units.size(); ++i) {
    Json stages = Json::array();
    for (const int stage : paging.units[i].stages)
      stages.push(static_cast<std::int64_t>(stage) + 1);
    Json unit = Json::object().set("name", paging.units[i].name).set("stages", stages);
    for (const auto& [kind, name] : kPageNames) {
      unit.set(fmt::format("{}_bytes", name), paging.units[i].bytes_of(kind))
          .set(fmt::format("{}_paged", name), paging.pages(i, kind));
    }
    unit.set("state_in_pieces", paging.streams(i));
    units.push(unit);
  }
  return Json::object()
      .set("reads_ahead", paging.reads_ahead)
      .set("updates", update_time_text(paging.updates))
      .set("bytes_read_per_update", paging.bytes_read)
      .set("bytes_written_per_update", paging.bytes_written)
      .set("disk_seconds_per_update", 1e-9 * static_cast<double>(paging.disk_ns))
      .set("wait_seconds_per_update", 1e-9 * static_cast<double>(paging.wait_ns))
      .set("units", units);
}

// "weights 120.0 MiB of 480.0 MiB, ...": what stays in memory.
std::string paging_text(const PagingPlan& paging) {
  std::string resident;
  for (const auto& [kind, name] : kPageNames) {
    std::int64_t all = 0, kept = 0;
    for (std::size_t i = 0; i < paging.units.size(); ++i) {
      all += paging.units[i].bytes_of(kind);
      if (!paging.pages(i, kind)) kept += paging.units[i].bytes_of(kind);
    }
    resident += fmt::format("{}{} {} of {}", resident.empty() ? "" : ", ", name, format_bytes(kept),
                            format_bytes(all));
  }
  return fmt::format(
      "paged:     in memory all the time are {}; parameters are updated {}\n"
      "           an update reads {} and writes {}: {:.3f} s of disk{}, of which {:.3f} s are "
      "waited for\n",
      resident, update_time_text(paging.updates), format_bytes(paging.bytes_read),
      format_bytes(paging.bytes_written), 1e-9 * static_cast<double>(paging.disk_ns),
      paging.reads_ahead ? ", read ahead and written behind" : "",
      1e-9 * static_cast<double>(paging.wait_ns));
}

Json stages_json(const RunPlan& plan) {
  Json stages = Json::array();
  const std::vector<StageDecision> chosen = decisions(plan);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const StageCosts& costs = plan.costs.stages[i];
    stages.push(
        Json::object()
            .set("name", costs.name)
            .set("decision", decision_text(plan, i, chosen[i]))
            .set("option", chosen[i].option)
            .set("num_forwards", chosen[i].num_forwards)
            .set("output_format", format_name(plan, chosen[i].output_format))
            .set("kept_bytes",
                 costs.options[static_cast<std::size_t>(std::max(chosen[i].option, 0))].kept_bytes)
            .set("extra_ns", extra_ns(costs, chosen[i])));
  }
  return stages;
}

Json operations_json(const RunPlan& plan) {
  Json operations = Json::array();
  for (std::size_t i = 0; i < schedule_of(plan).operations.size(); ++i) {
    const Operation& operation = schedule_of(plan).operations[i];
    operations.push(Json::object()
                        .set("op", operation_name(operation.kind))
                        .set("stage", operation.stage + 1)
                        .set("option", operation.option)
                        .set("format", format_name(plan, operation.format))
                        .set("finds_input", operation.finds_input)
                        .set("phase", phase_of(operation))
                        .set("peak_bytes", schedule_of(plan).curve[i].peak_bytes)
                        .set("live_bytes", schedule_of(plan).curve[i].live_bytes));
  }
  return operations;
}

Json alternatives_json(const RunPlan& plan) {
  Json alternatives = Json::array();
  for (const RunPlan::Alternative& other : plan.alternatives) {
    Json row =
        Json::object().set("memory_budget_bytes", other.budget_bytes).set("feasible", other.fits);
    if (other.fits) {
      row.set("micro_batch_size", other.micro_batch)
          .set("gradient_accumulation_steps", other.num_micro_batches)
          .set("predicted_step_seconds", other.step_seconds)
          .set("predicted_peak_bytes", other.peak_bytes);
    }
    alternatives.push(row);
  }
  return alternatives;
}

std::string stages_text(const RunPlan& plan) {
  Table table({"stage", "decision", "kept", "extra time"});
  const std::vector<StageDecision> chosen = decisions(plan);
  std::size_t shown = 0;
  for (std::size_t i = 0; i < chosen.size();) {
    // Equal neighbours share a row, so that a thousand blocks fit a screen.
    std::size_t end = i + 1;
    const auto row_of = [&](std::size_t index) {
      const StageCosts& costs = plan.costs.stages[index];
      const StageDecision& decision = chosen[index];
      return std::vector<std::string>{
          decision_text(plan, index, decision),
          format_bytes(
              costs.options[static_cast<std::size_t>(std::max(decision.option, 0))].kept_bytes),
          format_figure(static_cast<double>(extra_ns(costs, decision)) * 1e-6) + " ms"};
    };
    std::vector<std::string> row = row_of(i);
    while (end < chosen.size() && row_of(end) == row) ++end;
    const std::string first = plan.costs.stages[i].name;
    row.insert(row.begin(), end - i == 1
                                ? first
                                : fmt::format("{} .. {}", first, plan.costs.stages[end - 1].name));
    table.add_row(row);
    i = end;
    if (++shown == 60 && i < chosen.size()) {
      table.add_row({fmt::format("... and {} more", chosen.size() - i)});
      break;
    }
  }
  return table.to_text();
}

}  // namespace

Json to_json(const RunPlan& plan) {
  Json json = Json::object();
  json.set("global_batch_size", plan.global_batch)
      .set("world_size", plan.num_ranks)
      .set("micro_batch_size", plan.micro_batch())
      .set("gradient_accumulation_steps", plan.num_micro_batches())
      .set("memory_budget_bytes", plan.budget_bytes)
      .set("update_in_backward", plan.updates_in_backward());
  if (!plan.optimizer_state_bytes.empty())
    json.set("optimizer_state_bytes", bytes_json(plan.optimizer_state_bytes));
  if (!plan.is_predicted) return json;
  json.set("policy", plan.policy)
      .set("predicted_peak_bytes", plan.predicted_peak_bytes())
      .set("predicted_step_seconds", plan.predicted_step_seconds)
      .set("certified_gap_ns", schedule_of(plan).certified_gap_ns);
  json.set("bytes_by_owner", bytes_json(plan.bytes_by_owner))
      .set("peak_bytes_by_phase", bytes_json(phases_of(plan)));
  if (plan.paging.is_active()) json.set("paging", paging_json(plan.paging));
  return json.set("stages", stages_json(plan))
      .set("operations", operations_json(plan))
      .set("alternatives", alternatives_json(plan));
}

std::string to_text(const RunPlan& plan) {
  std::string text = fmt::format(
      "global batch {} = {}{} micro-batch{} of at most {} samples\n", plan.global_batch,
      plan.num_ranks == 1 ? "" : fmt::format("{} ranks x ", plan.num_ranks),
      plan.num_micro_batches(), plan.num_micro_batches() == 1 ? "" : "es", plan.micro_batch());
  if (!plan.optimizer_state_bytes.empty())
    text += fmt::format("optimizer state by --optim: {}\n", bytes_text(plan.optimizer_state_bytes));
  if (!plan.is_predicted) return text;
  text += fmt::format(
      "predicted: peak {}{}, {} s per update\n", format_bytes(plan.predicted_peak_bytes()),
      plan.budget_bytes > 0 ? fmt::format(" of {}", format_bytes(plan.budget_bytes)) : "",
      format_figure(plan.predicted_step_seconds));
  if (plan.updates_in_backward())
    text += "parameters are updated inside backward, and each gradient is freed at once\n";
  text += fmt::format("by owner:  {}\nby phase:  {}\n", bytes_text(plan.bytes_by_owner),
                      bytes_text(phases_of(plan)));
  if (plan.paging.is_active()) text += paging_text(plan.paging);
  text += stages_text(plan);
  for (const RunPlan::Alternative& other : plan.alternatives) {
    text += other.fits ? fmt::format("with {}: {} x {} samples, {} s per update, peak {}\n",
                                     format_bytes(other.budget_bytes), other.num_micro_batches,
                                     other.micro_batch, format_figure(other.step_seconds),
                                     format_bytes(other.peak_bytes))
                       : fmt::format("with {}: does not fit\n", format_bytes(other.budget_bytes));
  }
  return text;
}

}  // namespace headroom
