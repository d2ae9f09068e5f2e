#include "model/adapter_config.h"

#include <headroom/core/error.h>
#include "core/input_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>

namespace headroom {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostConfigBytes = 1 << 20;

// Values that this program has no other of; a key that is missing or null has this one.
const Json& fixed_values() {
  static const Json values = {{"peft_type", "LORA"},
                              {"bias", "none"},
                              {"use_rslora", false},
                              {"use_dora", false},
                              {"modules_to_save", Json()},
                              {"rank_pattern", Json::object()},
                              {"alpha_pattern", Json::object()}};
  return values;
}

template <typename Value>
void take(const Json& json, const std::string& path, const char* key, Value& value) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return;
  try {
    found->get_to(value);
  } catch (const Json::exception&) {
    throw ConfigError(fmt::format("'{}': {}: {} cannot be served here", path, key, found->dump()));
  }
}

std::vector<std::string> words_of(const Json& json, const std::string& path, const char* key) {
  std::vector<std::string> words;
  const auto found = json.find(key);
  if (found != json.end() && found->is_string()) {
    words.push_back(found->get<std::string>());
  } else {
    take(json, path, key, words);
  }
  return words;
}

}  // namespace

AdapterConfig read_adapter_config(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / kAdapterConfigFile).string();
  const Json json = Json::parse(InputFile(path).read_all(kMostConfigBytes), nullptr,
                                /*allow_exceptions=*/false);
  if (!json.is_object()) throw DataError(fmt::format("'{}' is not a JSON object", path));
  for (const auto& [key, value] : fixed_values().items()) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null() || *found == value) continue;
    throw ConfigError(fmt::format("'{}': {} is {}, and only {} can be served here", path, key,
                                  found->dump(), value.dump()));
  }
  AdapterConfig config;
  take(json, path, "base_model_name_or_path", config.base);
  take(json, path, "r", config.lora.r);
  take(json, path, "lora_alpha", config.lora.alpha);
  take(json, path, "lora_dropout", config.lora.dropout);
  take(json, path, "fan_in_fan_out", config.fan_in_fan_out);
  take(json, path, "task_type", config.task_type);
  config.lora.target_modules = words_of(json, path, "target_modules");
  return config;
}

std::string to_text(const AdapterConfig& config) {
  Json json = fixed_values();
  json["task_type"] = config.task_type.empty() ? Json() : Json(config.task_type);
  json["base_model_name_or_path"] = config.base;
  json["r"] = config.lora.r;
  json["lora_alpha"] = config.lora.alpha;
  json["lora_dropout"] = config.lora.dropout;
  json["target_modules"] = config.lora.target_modules;
  json["fan_in_fan_out"] = config.fan_in_fan_out;
  json["inference_mode"] = true;
  json["init_lora_weights"] = true;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace headroom
