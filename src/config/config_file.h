#pragma once

#include <headroom/config/training_arguments.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// The keys of a configuration file with their values as text, in the file's order.
using ConfigEntries = std::vector<std::pair<std::string, std::string>>;

/// Reads a JSON object of plain values. Throws ConfigError on a file that is missing or no such
/// object.
ConfigEntries read_config_entries(const std::string& path);

/// Sets arguments by the entries. Keys in `given_on_command_line` are checked and left alone.
/// Throws ConfigError on an unknown key (naming the nearest) and on a value that does not fit.
void apply_config_entries(TrainingArguments& arguments, const ConfigEntries& entries,
                          const std::set<std::string>& given_on_command_line);

}  // namespace headroom
