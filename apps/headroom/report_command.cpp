#include "commands.h"
#include "core/output_file.h"

#include "report/html_page.h"
#include "report/json.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace headroom {

Command add_report_command(CLI::App& app) {
  struct Flags {
    std::string folder;
    std::string output;
  };
  CLI::App* command = app.add_subcommand("report", "turn a run's folder into one HTML page");
  auto flags = std::make_shared<Flags>();
  command->add_option("DIR", flags->folder, "the --output_dir of a run")->required();
  command->add_option("--output", flags->output,
                      "where the page goes; without it, DIR/report.html");
  auto config = std::make_shared<ConfigFlag>(*command);
  return [flags, config] {
    config->apply();
    const std::string path = flags->output.empty() ? flags->folder + "/report.html" : flags->output;
    write_file_atomically(path, to_html(read_run(flags->folder)));
    fmt::print("{}\n", path);
    return 0;
  };
}

}  // namespace headroom
