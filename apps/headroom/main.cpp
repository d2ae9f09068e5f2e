#include "commands.h"
#include "core/input_file.h"
#include "standard_streams.h"

#include <headroom/core/error.h>
#include <headroom/core/version.h>
#include "core/nearest_name.h"

#include <c10/util/Exception.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <string>
#include <vector>

namespace {

// One line of readable length, whatever the error says.
int fail(const std::string& message, headroom::ExitCode code) {
  constexpr std::size_t kMost = 1200, kHead = 800, kTail = 300;
  std::string line = message.substr(0, message.find('\n'));
  if (line.size() > kMost)
    line = line.substr(0, kHead) + " ... " + line.substr(line.size() - kTail);
  std::fprintf(stderr, "headroom: %s\n", line.c_str());
  return static_cast<int>(code);
}

// The word that the parser did not know, with the nearest one that it does.
std::string unknown_word(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  if (word.rfind("--", 0) == 0) {
    for (const CLI::Option* option : app.get_options()) {
      if (!option->get_lnames().empty())
        known.push_back("--" + option->get_lnames().front());  // a positional one has none
    }
  } else {
    for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  }
  const std::string what =
      word.rfind('-', 0) == 0 ? "flag" : (known.empty() ? "argument" : "command");
  if (known.empty()) return "unknown " + what + " '" + word + "'";
  return "unknown " + what + " '" + word + "'; did you mean '" +
         headroom::nearest_name(word, known) + "'?";
}

std::string describe(const CLI::ParseError& error, const CLI::App& app,
                     const std::vector<std::string>& words) {
  if (words.empty()) return "give a command; headroom --help lists them";
  const auto commands = app.get_subcommands();
  if (commands.empty() && error.get_exit_code() == static_cast<int>(CLI::ExitCodes::RequiredError))
    return unknown_word(app, words.front());
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ExtrasError) || commands.empty())
    return error.what();
  // Values of an unknown flag are left over as well; the flag is what matters.
  const std::vector<std::string> extras = commands.front()->remaining();
  const auto flag = std::find_if(extras.begin(), extras.end(),
                                 [](const std::string& word) { return word.rfind("--", 0) == 0; });
  return extras.empty()
             ? error.what()
             : unknown_word(*commands.front(), flag != extras.end() ? *flag : extras.front());
}

// Runs a command and turns whatever it throws into one line and an exit code. Those that are no
// Error of ours are a defect (1), but for what only a user's machine can cause.
int finish(const headroom::Command& command) {
  using headroom::ExitCode;
  try {
    const int exit_code = command();
    headroom::check_standard_output();
    return exit_code;
  } catch (const headroom::Error& error) {
    return fail(error.what(), error.exit_code());
  } catch (const c10::OutOfMemoryError& error) {
    return fail(error.what_without_backtrace(), ExitCode::kBudget);
  } catch (const std::bad_alloc&) {
    return fail("this machine is out of memory, beside the tensors that --memory_budget counts",
                ExitCode::kBudget);
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(error.code().message() + ": " + headroom::shown_path(error.path1().string()),
                ExitCode::kData);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    // Sizes and batch are the user's choice, and a model's batch norms see them first.
    if (message.find("more than 1 value per channel when training") != std::string::npos) {
      return fail(
          "a BatchNorm of this model sees one pixel of one sample and cannot normalise it: give "
          "micro-batches of 2 samples or more (--per_device_train_batch_size, and "
          "--dataloader_drop_last where one sample is left over), or larger images",
          ExitCode::kConfig);
    }
    return fail(message, ExitCode::kInternal);
  } catch (const std::exception& error) {
    if (headroom::standard_output_failed())
      return fail(std::string("standard output cannot be written: ") + error.what(),
                  ExitCode::kConfig);
    return fail(error.what(), ExitCode::kInternal);
  }
}

}  // namespace

int main(int argc, char** argv) {
  using namespace headroom;
  open_standard_streams();
  CLI::App app("Trains a model in the memory that you have", "headroom");
  app.set_version_flag("--version", std::string("headroom ") + kVersion);
  app.require_subcommand(1);
  std::map<const CLI::App*, Command> commands;
  for (const auto& add :
       {add_train_command, add_plan_command, add_compare_command, add_estimate_command,
        add_report_command, add_evaluate_command, add_generate_command, add_info_command}) {
    const std::size_t before = app.get_subcommands({}).size();
    Command command = add(app);
    commands[app.get_subcommands({})[before]] = std::move(command);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return finish([&] { return app.exit(success); });
  } catch (const CLI::ParseError& error) {
    return fail(describe(error, app, {argv + 1, argv + argc}), ExitCode::kConfig);
  }
  return finish(commands.at(app.get_subcommands().front()));
}
