#pragma once

// "k=v,..." of --model_config, read into the config struct of a model.

#include <headroom/core/error.h>
#include "core/nearest_name.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Reads the value of a key into a member. The key is for messages. Throws ConfigError.
using ConfigSetter = std::function<void(const std::string& key, const std::string& value)>;
using ConfigSetters = std::map<std::string, ConfigSetter>;

// The limits keep every product of sizes that occurs inside 64 bits. Members outlive the setters.

/// A width, a vocabulary or a length: a whole number from 1 to 2^20.
ConfigSetter set_size(std::int64_t& member);
/// Rows, columns or channels of an image: from 1 to 2^13.
ConfigSetter set_side(std::int64_t& member);
/// Layers of a network: from 1 to 10000.
ConfigSetter set_layers(std::int64_t& member);
/// From 0 to 10000.
ConfigSetter set_count(std::int64_t& member);
/// set_side into several members.
ConfigSetter set_sides(std::vector<std::int64_t*> members);
/// A number from 0 to below 1.
ConfigSetter set_probability(double& member);
ConfigSetter set_probabilities(std::vector<double*> members);
/// A number above 0.
ConfigSetter set_positive(double& member);
/// true or false.
ConfigSetter set_flag(bool& member);
/// One of two words; the first means true.
bool parse_word(const std::string& key, const std::string& value, const std::string& yes,
                const std::string& no);

/// Carries out every pair of `text`. Throws ConfigError, naming the nearest key, on one that
/// `setters` does not have; `what` is "a GPT" or the name of a
/// model.
void read_config(const std::string& what, const std::string& text, const ConfigSetters& setters);

/// The keys, in alphabetical order.
std::vector<std::string> keys_of(const ConfigSetters& setters);

/// Models by name with their sizes.
template <class Config>
using Presets = std::vector<std::pair<std::string, Config>>;

template <class Config>
std::vector<std::string> names_of(const Presets<Config>& presets) {
  std::vector<std::string> names;
  for (const auto& preset : presets) names.push_back(preset.first);
  return names;
}

template <class Config>
Config find_preset(const Presets<Config>& presets, const std::string& name) {
  for (const auto& preset : presets) {
    if (preset.first == name) return preset.second;
  }
  throw ConfigError(unknown_name("model", name, names_of(presets)));
}

}  // namespace headroom
