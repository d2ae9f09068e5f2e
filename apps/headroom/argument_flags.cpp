#include "commands.h"

#include <headroom/core/error.h>
#include "config/argument_fields.h"
#include "config/config_file.h"
#include "core/input_file.h"
#include "core/nearest_name.h"
#include "data/data_format.h"
#include "model/family.h"
#include "model/script_folder.h"
#include "optim/optimizer_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <map>
#include <vector>

namespace headroom {

struct ArgumentFlags::Values {
  explicit Values(CLI::App& command) : config(command) {}
  ConfigFlag config;
  std::map<std::string, std::string> text;
  std::map<std::string, CLI::Option*> options;
  std::set<std::string> given;
};

namespace {

// What a flag takes, from the tables of the layers above config; empty for other flags.
std::vector<std::string> rows_of(const std::string& flag) {
  std::vector<std::string> rows;
  if (flag == "optim") {
    for (const OptimizerRow& row : optimizer_table())
      rows.push_back(fmt::format("{} ({})", row.name, row.help));
  } else if (flag == "model") {
    for (const ModelFamily& family : model_families())
      rows.push_back(fmt::format("{} ({})", fmt::join(family.names, ", "), family.help));
  } else if (flag == "model_config") {
    for (const ModelFamily& family : model_families())
      rows.push_back(fmt::format("{}: {}", family.names.front(), fmt::join(family.keys, ", ")));
  } else if (flag == "dataset") {
    for (const DataFormat& format : data_formats()) rows.emplace_back(format.help);
  }
  return rows;
}

std::string help_of(const ArgumentField& field) {
  const std::vector<std::string> rows = rows_of(field.name);
  return rows.empty() ? field.help : fmt::format("{}: {}", field.help, fmt::join(rows, "; "));
}

// Refuses names that are in no table before anything is made.
void check_names(const TrainingArguments& arguments) {
  const auto check = [](const char* flag, const std::string& name, const auto& find) {
    try {
      find(name);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("--{}: {}", flag, error.what()));
    }
  };
  check("optim", arguments.optim, optimizer_row);
  if (arguments.model_name_or_path.empty() && !requested_script(arguments))
    check("model", arguments.model, family_of);
}

}  // namespace

ConfigFlag::ConfigFlag(CLI::App& command)
    : command_(&command), path_(std::make_unique<std::string>()) {
  command.add_option("--config", *path_,
                     "a JSON file whose keys are these flags; a flag on the command line wins");
}

ConfigFlag::~ConfigFlag() = default;

ConfigEntries ConfigFlag::apply(const std::set<std::string>& others) const {
  ConfigEntries left;
  if (path_->empty()) return left;
  std::vector<std::string> known(others.begin(), others.end());
  std::map<std::string, CLI::Option*> options;
  for (CLI::Option* option : command_->get_options()) {
    const std::vector<std::string>& names = option->get_lnames();
    if (names.empty() || names.front() == "config" || names.front() == "help") continue;
    options[names.front()] = option;
    known.push_back(names.front());
  }
  for (const auto& [key, value] : read_config_entries(*path_)) {
    if (others.count(key) != 0) {
      left.emplace_back(key, value);
      continue;
    }
    const auto found = options.find(key);
    if (found == options.end()) {
      throw ConfigError(
          fmt::format("unknown key '{}'; did you mean '{}'?", key, nearest_name(key, known)));
    }
    if (found->second->count() > 0) continue;
    try {
      found->second->add_result(value);
      found->second->run_callback();
    } catch (const CLI::Error& error) {
      throw ConfigError(
          fmt::format("configuration file '{}': {}", shown_path(*path_), error.what()));
    }
  }
  return left;
}

ArgumentFlags::ArgumentFlags(CLI::App& command, const std::set<std::string>& names)
    : values_(std::make_unique<Values>(command)) {
  const TrainingArguments defaults;
  for (const ArgumentField& field : argument_fields()) {
    if (!names.empty() && names.count(field.name) == 0) continue;
    CLI::Option* option =
        command.add_option("--" + field.name, values_->text[field.name], help_of(field));
    if (field.value_is_optional) {
      // CLI11 would take a default text for the value of a flag that stands alone, so that --json
      // meant false: it is only shown.
      option->expected(0, 1)->type_name("[TEXT]=" + field.get(defaults));
    } else {
      option->default_str(field.get(defaults));
    }
    values_->options[field.name] = option;
  }
}

ArgumentFlags::~ArgumentFlags() = default;

const std::set<std::string>& ArgumentFlags::given() const { return values_->given; }

TrainingArguments ArgumentFlags::arguments(TrainingArguments defaults) const {
  TrainingArguments arguments = std::move(defaults);
  std::set<std::string> on_command_line;
  for (const auto& [name, option] : values_->options) {
    if (option->count() > 0) on_command_line.insert(name);
  }
  values_->given = on_command_line;
  std::set<std::string> names;
  for (const ArgumentField& field : argument_fields()) names.insert(field.name);
  const ConfigEntries entries = values_->config.apply(names);
  apply_config_entries(arguments, entries, on_command_line);
  for (const auto& [key, value] : entries) values_->given.insert(key);
  for (const ArgumentField& field : argument_fields()) {
    if (on_command_line.count(field.name) == 0) continue;
    const CLI::Option* option = values_->options.at(field.name);
    const bool alone =
        field.value_is_optional && (option->results().empty() || option->results().front().empty());
    field.set(arguments, alone ? field.value_when_alone : values_->text.at(field.name));
  }
  validate(arguments, values_->given);
  check_names(arguments);
  return arguments;
}

}  // namespace headroom
