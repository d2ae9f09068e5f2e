#include "config/config_file.h"

#include <headroom/core/error.h>
#include "config/argument_fields.h"
#include "core/input_file.h"
#include "core/nearest_name.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace headroom {

void set_argument(TrainingArguments& arguments, const std::string& name, const std::string& value) {
  const auto& fields = argument_fields();
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [&](const ArgumentField& field) { return field.name == name; });
  if (found == fields.end()) {
    std::vector<std::string> names;
    names.reserve(fields.size());
    for (const ArgumentField& field : fields) names.push_back(field.name);
    throw ConfigError(
        fmt::format("unknown key '{}'; did you mean '{}'?", name, nearest_name(name, names)));
  }
  found->set(arguments, value);
}

ConfigEntries read_config_entries(const std::string& path) {
  const nlohmann::json json = nlohmann::json::parse(read_json_text(path, throw_as<ConfigError>),
                                                    nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object())
    throw ConfigError(
        fmt::format("configuration file '{}' is not a JSON object", shown_path(path)));
  ConfigEntries entries;
  for (const auto& [key, value] : json.items()) {
    if (value.is_object() || value.is_array() || value.is_null()) {
      throw ConfigError(fmt::format(
          "configuration file '{}': the value of '{}' must be a text, a number or true/false",
          shown_path(path), key));
    }
    entries.emplace_back(key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return entries;
}

void apply_config_entries(TrainingArguments& arguments, const ConfigEntries& entries,
                          const std::set<std::string>& given_on_command_line) {
  for (const auto& [key, value] : entries) {
    TrainingArguments scratch = arguments;
    set_argument(given_on_command_line.count(key) != 0 ? scratch : arguments, key, value);
  }
}

std::vector<std::string> apply_config_file(TrainingArguments& arguments, const std::string& path,
                                           const std::set<std::string>& given_on_command_line) {
  const ConfigEntries entries = read_config_entries(path);
  apply_config_entries(arguments, entries, given_on_command_line);
  std::vector<std::string> keys;
  for (const auto& [key, value] : entries) keys.push_back(key);
  return keys;
}

}  // namespace headroom
