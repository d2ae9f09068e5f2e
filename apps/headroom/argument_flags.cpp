#include "commands.h"

#include <headroom/core/error.h>

#include <CLI/CLI.hpp>

#include <map>

namespace headroom {

struct ArgumentFlags::Values {
  std::map<std::string, std::string> text;
  std::map<std::string, CLI::Option*> options;
  std::string config_file;
  std::set<std::string> given;
};

ArgumentFlags::ArgumentFlags(CLI::App& command) : values_(std::make_unique<Values>()) {
  const TrainingArguments defaults;
  command.add_option("--config", values_->config_file,
                     "a JSON file whose keys are these flags; a flag on the command line wins");
  for (const ArgumentField& field : argument_fields()) {
    CLI::Option* option =
        command.add_option("--" + field.name, values_->text[field.name], field.help);
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
  return arguments;
}

}  // namespace headroom
