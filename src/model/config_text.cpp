#include "model/config_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace headroom {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 20;
constexpr std::int64_t kMaxSide = std::int64_t{1} << 13;
constexpr std::int64_t kMaxLayers = 10'000;

std::int64_t parse_integer(const std::string& key, const std::string& value, std::int64_t min,
                           std::int64_t max) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < min || number > max) {
    throw ConfigError(
        fmt::format("{}='{}': give a whole number from {} to {}", key, value, min, max));
  }
  return number;
}

ConfigSetter set_integers(std::vector<std::int64_t*> members, std::int64_t min, std::int64_t max) {
  return [=](const std::string& key, const std::string& value) {
    for (std::int64_t* member : members) *member = parse_integer(key, value, min, max);
  };
}

double parse_probability(const std::string& key, const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(number >= 0.0 && number < 1.0)) {
    throw ConfigError(fmt::format("{}='{}': give a number from 0 to below 1", key, value));
  }
  return number;
}

void set_pair(const std::string& what, const std::string& pair, const ConfigSetters& setters) {
  const std::size_t equals = pair.find('=');
  const std::string key = pair.substr(0, equals);
  const auto setter = setters.find(key);
  if (setter == setters.end()) {
    const std::vector<std::string> keys = keys_of(setters);
    throw ConfigError(fmt::format("{} has no '{}'; did you mean '{}'? (keys: {})", what, key,
                                  nearest_name(key, keys), fmt::join(keys, ", ")));
  }
  if (equals == std::string::npos)
    throw ConfigError(fmt::format("'{}' has no value: write {}=...", key, key));
  setter->second(key, pair.substr(equals + 1));
}

}  // namespace

ConfigSetter set_size(std::int64_t& member) { return set_integers({&member}, 1, kMaxSize); }
ConfigSetter set_side(std::int64_t& member) { return set_sides({&member}); }
ConfigSetter set_layers(std::int64_t& member) { return set_integers({&member}, 1, kMaxLayers); }
ConfigSetter set_count(std::int64_t& member) { return set_integers({&member}, 0, kMaxLayers); }

ConfigSetter set_sides(std::vector<std::int64_t*> members) {
  return set_integers(std::move(members), 1, kMaxSide);
}

ConfigSetter set_probability(double& member) { return set_probabilities({&member}); }

ConfigSetter set_probabilities(std::vector<double*> members) {
  return [members = std::move(members)](const std::string& key, const std::string& value) {
    for (double* member : members) *member = parse_probability(key, value);
  };
}

ConfigSetter set_positive(double& member) {
  return [&member](const std::string& key, const std::string& value) {
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(number > 0.0 && std::isfinite(number)))
      throw ConfigError(fmt::format("{}='{}': give a number above 0", key, value));
    member = number;
  };
}

ConfigSetter set_flag(bool& member) {
  return [&member](const std::string& key, const std::string& value) {
    member = parse_word(key, value, "true", "false");
  };
}

bool parse_word(const std::string& key, const std::string& value, const std::string& yes,
                const std::string& no) {
  if (value == yes) return true;
  if (value == no) return false;
  throw ConfigError(fmt::format("{}='{}': give {} or {}", key, value, yes, no));
}

void read_config(const std::string& what, const std::string& text, const ConfigSetters& setters) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    set_pair(what, text.substr(begin, end - begin), setters);
    begin = end + 1;
  }
}

std::vector<std::string> keys_of(const ConfigSetters& setters) {
  std::vector<std::string> keys;
  for (const auto& entry : setters) keys.push_back(entry.first);
  return keys;
}

}  // namespace headroom
