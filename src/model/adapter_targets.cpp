#include "model/adapter_targets.h"

#include <headroom/core/error.h>
#include "core/name_list.h"
#include "core/nearest_name.h"
#include "core/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

bool means(const std::string& target, const std::string& layer) {
  return target == kAllLinear || layer == target || ends_with(layer, "." + target);
}

// The shortest that means something: of a layer of a Sequential that is not its number.
std::string shown_name(const std::string& layer) {
  const std::string word = last_word(layer);
  const bool is_number = word.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? layer : word;
}

[[noreturn]] void refuse_target(const std::string& target, const std::vector<std::string>& layers) {
  constexpr std::size_t kMostShown = 24;
  std::vector<std::string> names = {kAllLinear};
  for (const std::string& layer : layers) {
    const std::string name = shown_name(layer);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  throw ConfigError(
      fmt::format("there is no linear layer '{}' that can have an adapter; did you mean '{}'? ({})",
                  target, nearest_name(target, names), name_list(names, kMostShown)));
}

}  // namespace

std::string layer_name(const std::string& weight) {
  constexpr std::string_view kEnding = ".weight";
  return ends_with(weight, kEnding) ? weight.substr(0, weight.size() - kEnding.size()) : weight;
}

std::string last_word(const std::string& name) { return name.substr(name.rfind('.') + 1); }

std::vector<std::size_t> targeted_layers(const std::vector<std::string>& layers,
                                         const std::vector<std::string>& targets) {
  for (const std::string& target : targets) {
    if (std::none_of(layers.begin(), layers.end(),
                     [&](const std::string& layer) { return means(target, layer); }))
      refuse_target(target, layers);
  }
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (std::any_of(targets.begin(), targets.end(),
                    [&](const std::string& target) { return means(target, layers[i]); }))
      places.push_back(i);
  }
  return places;
}

}  // namespace headroom
