// How an estimate is shown, to people and to machines.
#include <headroom/train/estimate.h>

#include <headroom/core/bytes.h>
#include "report/json.h"
#include "report/table.h"

#include <fmt/format.h>

namespace headroom {
namespace {

const char* const kPolicyNames[] = {"keep everything", "every", "sqrt", "leanest plan"};

std::string split_text(const EstimatedStrategy& strategy) {
  return strategy.num_micro_batches == 1
             ? fmt::format("a batch of {}", strategy.micro_batch)
             : fmt::format("{} micro-batches of at most {}", strategy.num_micro_batches,
                           strategy.micro_batch);
}

std::string flags_text(const EstimatedStrategy& strategy, std::int64_t global_batch) {
  if (strategy.name == "paged plan")
    return fmt::format("--global_batch_size {}, this --memory_budget and this --spill_dir",
                       global_batch);
  if (strategy.name == "plan")
    return fmt::format("--global_batch_size {} and this --memory_budget", global_batch);
  std::string text = fmt::format("--global_batch_size {} --per_device_train_batch_size {}",
                                 global_batch, strategy.micro_batch);
  return strategy.policy == "none" ? text : text + " --gradient_checkpointing " + strategy.policy;
}

Json strategy_json(const EstimatedStrategy& strategy) {
  return Json::object()
      .set("way", strategy.name)
      .set("policy", strategy.policy)
      .set("micro_batch_size", strategy.micro_batch)
      .set("gradient_accumulation_steps", strategy.num_micro_batches)
      .set("activation_bytes", strategy.activation_bytes)
      .set("peak_bytes", strategy.peak_bytes);
}

std::string answer_text(const Estimate& estimate) {
  const std::string budget = format_bytes(estimate.budget_bytes);
  if (!estimate.fits()) {
    return fmt::format("{} with --optim {}: no. The least is {} ({} bytes), with {}.\n", budget,
                       estimate.optim, format_bytes(estimate.floor.peak_bytes),
                       estimate.floor.peak_bytes, split_text(estimate.floor));
  }
  Table table({"way", "split", "activations", "peak", "flags"});
  for (const EstimatedStrategy& strategy : estimate.strategies) {
    table.add_row({strategy.policy == "none" || strategy.policy == "optimal"
                       ? strategy.name
                       : strategy.name + " " + strategy.policy,
                   split_text(strategy), format_bytes(strategy.activation_bytes),
                   format_bytes(strategy.peak_bytes), flags_text(strategy, estimate.global_batch)});
  }
  return fmt::format("{} with --optim {}: yes. What fits, the simplest first:\n{}", budget,
                     estimate.optim, table.to_text());
}

}  // namespace

Json to_json(const Estimate& estimate) {
  Json json = Json::object();
  json.set("model", estimate.model)
      .set("num_parameters", estimate.num_parameters)
      .set("global_batch_size", estimate.global_batch)
      .set("world_size", estimate.num_ranks)
      .set("weights_bytes", estimate.weights_bytes)
      .set("gradients_bytes", estimate.gradients_bytes)
      .set("input_bytes", estimate.input_bytes)
      .set("times_are_measured", false)
      .set("bytes_are_measured", estimate.bytes_are_measured);
  Json policies = Json::array();
  for (const EstimatedStrategy& strategy : estimate.policies)
    policies.push(strategy_json(strategy));
  json.set("policies", policies);
  Json optimizers = Json::array();
  for (const auto& [name, bytes] : estimate.state_bytes) {
    const std::int64_t more = bytes - estimate.state_bytes_of(estimate.optim);
    Json peaks = Json::object();
    for (const EstimatedStrategy& strategy : estimate.policies)
      peaks.set(strategy.policy, strategy.peak_bytes + more);
    optimizers.push(
        Json::object().set("optim", name).set("state_bytes", bytes).set("peak_bytes", peaks));
  }
  json.set("optimizers", optimizers)
      .set("optim", estimate.optim)
      .set("floor", strategy_json(estimate.floor));
  if (!estimate.paged_floor.name.empty()) {
    json.set("paged_floor", strategy_json(estimate.paged_floor)
                                .set("bytes_read_per_update", estimate.paged_bytes_read)
                                .set("bytes_written_per_update", estimate.paged_bytes_written));
  }
  if (estimate.budget_bytes == 0) return json;
  Json strategies = Json::array();
  for (const EstimatedStrategy& strategy : estimate.strategies)
    strategies.push(strategy_json(strategy));
  return json.set("memory_budget_bytes", estimate.budget_bytes)
      .set("fits", estimate.fits())
      .set("ways", strategies);
}

std::string to_text(const Estimate& estimate) {
  const EstimatedStrategy& plain = estimate.policies.front();
  std::string text = fmt::format(
      "{}: {} parameters; global batch {} as {}{}\nweights {}, gradients {}, inputs {}\n",
      estimate.model, estimate.num_parameters, estimate.global_batch,
      estimate.num_ranks == 1 ? "" : fmt::format("{} ranks x ", estimate.num_ranks),
      split_text(plain), format_bytes(estimate.weights_bytes),
      format_bytes(estimate.gradients_bytes), format_bytes(estimate.input_bytes));
  std::vector<std::string> heads{"peak by optimizer", "state"};
  std::vector<std::string> activations{"activations", ""};
  for (std::size_t i = 0; i < estimate.policies.size(); ++i) {
    heads.emplace_back(kPolicyNames[i]);
    activations.push_back(format_bytes(estimate.policies[i].activation_bytes));
  }
  Table table(heads);
  for (const auto& [name, bytes] : estimate.state_bytes) {
    std::vector<std::string> row{name, format_bytes(bytes)};
    for (const EstimatedStrategy& strategy : estimate.policies) {
      row.push_back(
          format_bytes(strategy.peak_bytes + bytes - estimate.state_bytes_of(estimate.optim)));
    }
    table.add_row(row);
  }
  table.add_row(activations);
  text += table.to_text();
  text += fmt::format("The least for this global batch with --optim {}: {}, {}.\n", estimate.optim,
                      format_bytes(estimate.floor.peak_bytes), split_text(estimate.floor));
  if (!estimate.paged_floor.name.empty()) {
    text += fmt::format(
        "The least with weights, gradients and optimizer state paged to --spill_dir: {} ({} "
        "bytes), {}; an update then reads {} and writes {}.\n",
        format_bytes(estimate.paged_floor.peak_bytes), estimate.paged_floor.peak_bytes,
        split_text(estimate.paged_floor), format_bytes(estimate.paged_bytes_read),
        format_bytes(estimate.paged_bytes_written));
  }
  if (estimate.budget_bytes > 0) text += answer_text(estimate);
  return text + (estimate.bytes_are_measured
                     ? "Bytes are measured by running one stage at a time, because some operation "
                       "of this model has no shapes without memory; `headroom plan` measures "
                       "times.\n"
                     : "Bytes are counted, nothing was run: times are not known, and `headroom "
                       "plan` measures them.\n");
}

}  // namespace headroom
