#include "commands.h"

#include <headroom/core/error.h>
#include <headroom/core/version.h>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <map>
#include <string>

namespace {

// One line, whatever the error says.
int fail(const std::string& message, headroom::ExitCode code) {
  const std::string line = message.substr(0, message.find('\n'));
  std::fprintf(stderr, "headroom: %s\n", line.c_str());
  return static_cast<int>(code);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace headroom;
  CLI::App app("Trains a model in the memory that you have", "headroom");
  app.set_version_flag("--version", std::string("headroom ") + kVersion);
  app.require_subcommand(1);
  std::map<const CLI::App*, Command> commands;
  for (const auto& add : {add_train_command, add_plan_command, add_compare_command, add_estimate_command, add_info_command}) {
    const std::size_t before = app.get_subcommands({}).size();
    Command command = add(app);
    commands[app.get_subcommands({})[before]] = std::move(command);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return fail(error.what(), ExitCode::kConfig);
  }
  try {
    return commands.at(app.get_subcommands().front())();
  } catch (const Error& error) {
    return fail(error.what(), error.exit_code());
  } catch (const c10::OutOfMemoryError& error) {
    return fail(error.what_without_backtrace(), ExitCode::kBudget);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), ExitCode::kInternal);
  } catch (const std::exception& error) {
    return fail(error.what(), ExitCode::kInternal);
  }
}
