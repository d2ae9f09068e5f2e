#include "commands.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer_config.h>
#include <headroom/report/json.h>
#include <headroom/report/table.h>

#include <fmt/format.h>
#include <torch/types.h>
#include <CLI/CLI.hpp>

#include <numeric>

namespace headroom {
namespace {

struct EstimateFlags {
  std::string model = "gpt2";
  std::string model_config;
  std::string memory_budget;
  bool json = false;
};

std::vector<std::vector<std::int64_t>> parameter_shapes(const Chain& chain) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const auto& item : chain.named_parameters()) shapes.push_back(item.second.sizes().vec());
  return shapes;
}

}  // namespace

Command add_estimate_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("estimate", "bytes of weights, gradients and each optimizer's state of a model (\"will it fit?\")");
  auto flags = std::make_shared<EstimateFlags>();
  command->add_option("--model", flags->model, "a model of the zoo")->capture_default_str();
  command->add_option("--model_config", flags->model_config, "sizes of the model as k=v,...");
  command->add_option("--memory_budget", flags->memory_budget, "say which optimizers leave room for activations within this");
  command->add_flag("--json", flags->json, "for machines");
  return [flags] {
    const ZooModel model = make_model(flags->model, flags->model_config);
    const auto shapes = parameter_shapes(model.chain);
    const std::int64_t weights = 4 * model.chain.num_parameters();
    const std::int64_t budget = flags->memory_budget.empty() ? 0 : parse_bytes(flags->memory_budget);
    Table table({"optimizer", "state", "weights + gradients + state", "left for activations"});
    Json rows = Json::array();
    for (const std::string& name : optimizer_names()) {
      OptimizerConfig config;
      config.name = name;
      const std::int64_t state = optimizer_state_bytes(config, shapes);
      const std::int64_t total = 2 * weights + state;
      table.add_row(
          {name, format_bytes(state), format_bytes(total),
           budget == 0 ? "-" : (total < budget ? format_bytes(budget - total) : fmt::format("short of {}", format_bytes(total - budget)))});
      Json row = Json::object();
      row.set("optim", name).set("state_bytes", state).set("total_bytes", total);
      if (budget > 0) row.set("fits", total < budget).set("left_bytes", budget - total);
      rows.push(row);
    }
    if (flags->json) {
      Json object = Json::object();
      object.set("model", flags->model)
          .set("num_parameters", model.chain.num_parameters())
          .set("weights_bytes", weights)
          .set("gradients_bytes", weights)
          .set("optimizers", rows);
      fmt::print("{}\n", object.dump());
    } else {
      fmt::print("{}: {} parameters, weights {}, gradients {}\n{}", flags->model, model.chain.num_parameters(), format_bytes(weights),
                 format_bytes(weights), table.to_text());
    }
    return 0;
  };
}

}  // namespace headroom
