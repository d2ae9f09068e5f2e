// How an estimate is shown, to people and to machines.
#include <headroom/train/estimate.h>

#include <headroom/core/bytes.h>
#include <headroom/report/table.h>

#include <fmt/format.h>

namespace headroom {
namespace {

const char* const kPolicyNames[] = {"keep everything", "every", "sqrt", "leanest plan"};

std::string split_text(const EstimatedWay& way) {
  return way.num_micro_batches == 1 ? fmt::format("a batch of {}", way.micro_batch)
                                    : fmt::format("{} micro-batches of at most {}", way.num_micro_batches, way.micro_batch);
}

std::string flags_text(const EstimatedWay& way, std::int64_t global_batch) {
  if (way.name == "plan") return fmt::format("--global_batch_size {} and this --memory_budget", global_batch);
  std::string text = fmt::format("--global_batch_size {} --per_device_train_batch_size {}", global_batch, way.micro_batch);
  return way.policy == "none" ? text : text + " --gradient_checkpointing " + way.policy;
}

Json way_json(const EstimatedWay& way) {
  return Json::object()
      .set("way", way.name)
      .set("policy", way.policy)
      .set("micro_batch_size", way.micro_batch)
      .set("gradient_accumulation_steps", way.num_micro_batches)
      .set("activation_bytes", way.activation_bytes)
      .set("peak_bytes", way.peak_bytes);
}

std::string answer_text(const Estimate& estimate) {
  const std::string budget = format_bytes(estimate.budget_bytes);
  if (!estimate.fits()) {
    return fmt::format("{} with --optim {}: no. The least is {} ({} bytes), {} one way or another.\n", budget, estimate.optim,
                       format_bytes(estimate.floor.peak_bytes), estimate.floor.peak_bytes, split_text(estimate.floor));
  }
  Table table({"way", "split", "activations", "peak", "flags"});
  for (const EstimatedWay& way : estimate.ways) {
    table.add_row({way.policy == "none" || way.name == "plan" ? way.name : way.name + " " + way.policy, split_text(way),
                   format_bytes(way.activation_bytes), format_bytes(way.peak_bytes), flags_text(way, estimate.global_batch)});
  }
  return fmt::format("{} with --optim {}: yes. What fits, the simplest first:\n{}", budget, estimate.optim, table.to_text());
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
      .set("times_are_measured", false);
  Json policies = Json::array();
  for (const EstimatedWay& way : estimate.policies) policies.push(way_json(way));
  json.set("policies", policies);
  Json optimizers = Json::array();
  for (const auto& [name, bytes] : estimate.state_bytes) {
    const std::int64_t more = bytes - estimate.state_bytes_of(estimate.optim);
    Json peaks = Json::object();
    for (const EstimatedWay& way : estimate.policies) peaks.set(way.policy, way.peak_bytes + more);
    optimizers.push(Json::object().set("optim", name).set("state_bytes", bytes).set("peak_bytes", peaks));
  }
  json.set("optimizers", optimizers).set("optim", estimate.optim).set("floor", way_json(estimate.floor));
  if (estimate.budget_bytes == 0) return json;
  Json ways = Json::array();
  for (const EstimatedWay& way : estimate.ways) ways.push(way_json(way));
  return json.set("memory_budget_bytes", estimate.budget_bytes).set("fits", estimate.fits()).set("ways", ways);
}

std::string to_text(const Estimate& estimate) {
  const EstimatedWay& plain = estimate.policies.front();
  std::string text = fmt::format(
      "{}: {} parameters; global batch {} as {}{}\nweights {}, gradients {}, inputs {}\n", estimate.model, estimate.num_parameters,
      estimate.global_batch, estimate.num_ranks == 1 ? "" : fmt::format("{} ranks x ", estimate.num_ranks), split_text(plain),
      format_bytes(estimate.weights_bytes), format_bytes(estimate.gradients_bytes), format_bytes(estimate.input_bytes));
  std::vector<std::string> heads{"peak by optimizer", "state"};
  std::vector<std::string> activations{"activations", ""};
  for (std::size_t i = 0; i < estimate.policies.size(); ++i) {
    heads.emplace_back(kPolicyNames[i]);
    activations.push_back(format_bytes(estimate.policies[i].activation_bytes));
  }
  Table table(heads);
  for (const auto& [name, bytes] : estimate.state_bytes) {
    std::vector<std::string> row{name, format_bytes(bytes)};
    for (const EstimatedWay& way : estimate.policies) {
      row.push_back(format_bytes(way.peak_bytes + bytes - estimate.state_bytes_of(estimate.optim)));
    }
    table.add_row(row);
  }
  table.add_row(activations);
  text += table.to_text();
  text += fmt::format("The least for this global batch with --optim {}: {}, {}.\n", estimate.optim, format_bytes(estimate.floor.peak_bytes),
                      split_text(estimate.floor));
  if (estimate.budget_bytes > 0) text += answer_text(estimate);
  return text + "Bytes are counted, nothing was run: times are not known, and `headroom plan` measures them.\n";
}

}  // namespace headroom
