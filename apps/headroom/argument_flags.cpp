#include "commands.h"

#include <headroom/core/error.h>
#include "config/argument_fields.h"
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
  std::map<std::string, std::string> text;
  std::map<std::string, CLI::Option*> options;
  std::string config_file;
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

ArgumentFlags::ArgumentFlags(CLI::App& command, const std::set<std::string>& names)
    : values_(std::make_unique<Values>()) {
  const TrainingArguments defaults;
  command.add_option("--config", values_->config_file,
                     "a JSON file whose keys are these flags; a flag on the command line wins");
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
  if (!values_->config_file.empty()) {
    for (const std::string& key :
         apply_config_file(arguments, values_->config_file, on_command_line))
      values_->given.insert(key);
  }
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
