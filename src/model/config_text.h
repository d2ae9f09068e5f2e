#pragma once

// "k=v,..." of --model_config, read into the config struct of a model.

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

/// A whole number from 1 to 2^30. The members outlive the setter.
ConfigSetter set_size(std::int64_t& member);
/// The same into several members.
ConfigSetter set_sizes(std::vector<std::int64_t*> members);
/// A number from 0 to below 1.
ConfigSetter set_probability(double& member);
ConfigSetter set_probabilities(std::vector<double*> members);
/// One of two words; the first means true.
bool parse_word(const std::string& key, const std::string& value, const std::string& yes,
                const std::string& no);

/// Carries out every pair of `text`. Throws ConfigError, naming the nearest key, on one that
/// `setters` does not have; `what` is "a GPT", say.
void read_config(const std::string& what, const std::string& text, const ConfigSetters& setters);

/// Models by name with their sizes.
template <class Config>
using Presets = std::vector<std::pair<std::string, Config>>;

template <class Config>
std::vector<std::string> names_of(const Presets<Config>& presets) {
  std::vector<std::string> names;
  for (const auto& preset : presets) names.push_back(preset.first);
  return names;
}

[[noreturn]] void throw_unknown_model(const std::string& name,
                                      const std::vector<std::string>& known);

template <class Config>
Config find_preset(const Presets<Config>& presets, const std::string& name) {
  for (const auto& preset : presets) {
    if (preset.first == name) return preset.second;
  }
  throw_unknown_model(name, names_of(presets));
}

}  // namespace headroom
