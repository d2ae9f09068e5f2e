#include "commands.h"
#include "report/json.h"

#include <headroom/core/runtime.h>
#include <headroom/train/estimate.h>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace headroom {

Command add_estimate_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "estimate", "what training a model would occupy, without making it (\"will it fit?\")");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  return [flags] {
    const TrainingArguments arguments = flags->arguments();
    configure_threads(
        static_cast<int>(arguments.num_threads),
        static_cast<int>(arguments.nproc_per_node));  // each thread has scratch memory of its own
    const Estimate result = estimate(arguments);
    fmt::print("{}", arguments.json ? to_json(result).dump() + "\n" : to_text(result));
    return 0;
  };
}

}  // namespace headroom
