#pragma once

// adapter_config.json of a folder in PEFT's layout.

#include <headroom/model/adapters.h>

#include <string>

namespace headroom {

inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";

struct AdapterConfig {
  LoraConfig lora;
  std::string base;             ///< the folder of the model that was adapted
  bool fan_in_fan_out = false;  ///< weights of the base are (in, out)
  std::string task_type;        ///< "CAUSAL_LM"; empty: none
};

/// Throws DataError when the file is missing or no JSON object, and ConfigError on adapters of
/// another kind than add_adapters() makes.
AdapterConfig read_adapter_config(const std::string& folder);
std::string to_text(const AdapterConfig& config);

}  // namespace headroom
