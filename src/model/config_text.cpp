#include "model/config_text.h"

#include <headroom/config/training_arguments.h>
#include <headroom/core/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace headroom {
namespace {

std::int64_t parse_size(const std::string& key, const std::string& value) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < 1 ||
      number > (std::int64_t{1} << 30)) {
    throw ConfigError(fmt::format("{}={}: give a whole number from 1 to 2^30", key, value));
  }
  return number;
}

double parse_probability(const std::string& key, const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(number >= 0.0 && number < 1.0)) {
    throw ConfigError(fmt::format("{}={}: give a number from 0 to below 1", key, value));
  }
  return number;
}

void set_pair(const std::string& what, const std::string& pair, const ConfigSetters& setters) {
  const std::size_t equals = pair.find('=');
  const std::string key = pair.substr(0, equals);
  const auto setter = setters.find(key);
  if (setter == setters.end()) {
    std::vector<std::string> keys;
    for (const auto& entry : setters) keys.push_back(entry.first);
    throw ConfigError(fmt::format("{} has no '{}'; did you mean '{}'? (keys: {})", what, key,
                                  nearest_name(key, keys), fmt::join(keys, ", ")));
  }
  if (equals == std::string::npos)
    throw ConfigError(fmt::format("'{}' has no value: write {}=...", key, key));
  setter->second(key, pair.substr(equals + 1));
}

}  // namespace

ConfigSetter set_size(std::int64_t& member) { return set_sizes({&member}); }

ConfigSetter set_sizes(std::vector<std::int64_t*> members) {
  return [members = std::move(members)](const std::string& key, const std::string& value) {
    for (std::int64_t* member : members) *member = parse_size(key, value);
  };
}

ConfigSetter set_probability(double& member) { return set_probabilities({&member}); }

ConfigSetter set_probabilities(std::vector<double*> members) {
  return [members = std::move(members)](const std::string& key, const std::string& value) {
    for (double* member : members) *member = parse_probability(key, value);
  };
}

bool parse_word(const std::string& key, const std::string& value, const std::string& yes,
                const std::string& no) {
  if (value == yes) return true;
  if (value == no) return false;
  throw ConfigError(fmt::format("{}={}: give {} or {}", key, value, yes, no));
}

void read_config(const std::string& what, const std::string& text, const ConfigSetters& setters) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    set_pair(what, text.substr(begin, end - begin), setters);
    begin = end + 1;
  }
}

void throw_unknown_model(const std::string& name, const std::vector<std::string>& known) {
  throw ConfigError(
      fmt::format("there is no model '{}'; did you mean '{}'?", name, nearest_name(name, known)));
}

}  // namespace headroom
