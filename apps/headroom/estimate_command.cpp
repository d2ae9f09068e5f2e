#include "commands.h"
#include "report/json.h"

#include <headroom/core/error.h>
#include <headroom/core/runtime.h>
#include <headroom/train/estimate.h>

#include <c10/util/Exception.h>
#include "train/auto_budget.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace headroom {
namespace {

// LibTorch counts the bytes of a tensor in 64 bits and throws an error of its own where they do not
// suffice.
Estimate estimate_checked(const TrainingArguments& arguments) {
  try {
    if (const std::optional<Task> task = make_uncapped_script_task(arguments))
      return estimate(arguments, task->model.chain, *task->train_data);
    return estimate(arguments);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    if (message.find("overflow") == std::string::npos) throw;
    throw ConfigError(fmt::format(
        "a tensor of this model and batch has more bytes than 64 bits count: {}", message));
  }
}

}  // namespace

Command add_estimate_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "estimate", "what training a model would occupy, without making it (\"will it fit?\")");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  return [flags] {
    TrainingArguments arguments = flags->arguments();
    configure_threads(
        static_cast<int>(arguments.num_threads),
        static_cast<int>(arguments.nproc_per_node));  // each thread has scratch memory of its own
    settle_budget(arguments, arguments.nproc_per_node);
    const Estimate result = estimate_checked(arguments);
    fmt::print("{}", arguments.json ? to_json(result).dump() + "\n" : to_text(result));
    return 0;
  };
}

}  // namespace headroom
