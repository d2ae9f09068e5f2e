#include "commands.h"
#include "plan_chain.h"

#include <headroom/core/error.h>
#include <headroom/train/run_plan.h>
#include <headroom/train/trainer.h>
#include "report/json.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace headroom {
namespace {

int plan_model(const TrainingArguments& arguments) {
  const Task task = make_task(arguments, arguments.nproc_per_node);
  Trainer trainer(task.arguments, task.model.chain, task.train_data, task.eval_data);
  const RunPlan plan = trainer.plan();
  fmt::print("{}", arguments.json ? to_json(plan).dump() + "\n" : to_text(plan));
  return 0;
}

}  // namespace

Command add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan", "show the plan that train would use, and stop; or plan a chain of numbers");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  auto chain = std::make_shared<PlanChainOptions>();
  CLI::Option* chain_option = command->add_option(
      "--chain", chain->chain_path, "a JSON file with a chain as numbers, instead of a model");
  command
      ->add_option("--policy", chain->policy,
                   "with --chain: optimal, none, every, segments=K, sqrt, log or revolve=C")
      ->capture_default_str()
      ->needs(chain_option);
  CLI::Option* frontier =
      command->add_flag("--frontier", chain->frontier, "with --chain: the whole memory/time curve")
          ->needs(chain_option);
  command->add_flag("--csv", chain->csv, "with --frontier: as CSV")->needs(frontier);
  CLI::Option* budget = command->get_option("--memory_budget");
  CLI::Option* json = command->get_option("--json");
  return [flags, chain, chain_option, budget, json] {
    if (chain_option->count() == 0) {
      const TrainingArguments arguments = flags->arguments();
      if (chain_option->count() == 0) return plan_model(arguments);
      // The configuration file names a chain.
      if (arguments.memory_budget_bytes > 0)
        chain->memory_budget = std::to_string(arguments.memory_budget_bytes);
      chain->json = arguments.json;
      return run_plan_chain(*chain);
    }
    if (budget->count() > 0) chain->memory_budget = budget->as<std::string>();
    chain->json =
        json->count() > 0 && (json->results().empty() || json->results().front() != "false");
    return run_plan_chain(*chain);
  };
}

}  // namespace headroom
