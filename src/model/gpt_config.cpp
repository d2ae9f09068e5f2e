#include <headroom/config/training_arguments.h>
#include <headroom/core/error.h>
#include <headroom/model/gpt.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstdlib>
#include <functional>
#include <map>
#include <utility>

namespace headroom {
namespace {

const std::vector<std::pair<std::string, GptConfig>>& presets() {
  static const std::vector<std::pair<std::string, GptConfig>> all = [] {
    const auto gpt2 = [](std::int64_t n_layer, std::int64_t n_head, std::int64_t n_embd) {
      GptConfig config;
      config.n_layer = n_layer;
      config.n_head = n_head;
      config.n_embd = n_embd;
      config.block_size = 1024;
      config.vocab_size = 50257;
      return config;
    };
    return std::vector<std::pair<std::string, GptConfig>>{{"gpt", GptConfig()},
                                                          {"gpt2", gpt2(12, 12, 768)},
                                                          {"gpt2-medium", gpt2(24, 16, 1024)},
                                                          {"gpt2-large", gpt2(36, 20, 1280)},
                                                          {"gpt2-xl", gpt2(48, 25, 1600)}};
  }();
  return all;
}

std::int64_t parse_size(const std::string& key, const std::string& value) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < 1 || number > (std::int64_t{1} << 30)) {
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

// One of two words; the first means true.
bool parse_word(const std::string& key, const std::string& value, const std::string& yes, const std::string& no) {
  if (value == yes) return true;
  if (value == no) return false;
  throw ConfigError(fmt::format("{}={}: give {} or {}", key, value, yes, no));
}

using Setter = std::function<void(GptConfig& config, const std::string& value)>;

const std::map<std::string, Setter>& setters() {
  const auto size = [](const char* key, std::int64_t GptConfig::*member) {
    return std::make_pair(std::string(key),
                          Setter([=](GptConfig& config, const std::string& value) { config.*member = parse_size(key, value); }));
  };
  static const std::map<std::string, Setter> all{
      size("n_layer", &GptConfig::n_layer),
      size("n_head", &GptConfig::n_head),
      size("n_embd", &GptConfig::n_embd),
      size("block_size", &GptConfig::block_size),
      size("vocab_size", &GptConfig::vocab_size),
      {"dropout", [](GptConfig& config, const std::string& value) { config.dropout = parse_probability("dropout", value); }},
      {"bias", [](GptConfig& config, const std::string& value) { config.bias = parse_word("bias", value, "true", "false"); }},
      {"gelu",
       [](GptConfig& config, const std::string& value) {
         config.gelu = parse_word("gelu", value, "tanh", "exact") ? GeluKind::kTanh : GeluKind::kExact;
       }},
  };
  return all;
}

void set_pair(GptConfig& config, const std::string& pair) {
  const std::size_t equals = pair.find('=');
  const std::string key = pair.substr(0, equals);
  const auto setter = setters().find(key);
  if (setter == setters().end()) {
    std::vector<std::string> keys;
    for (const auto& entry : setters()) keys.push_back(entry.first);
    throw ConfigError(fmt::format("a GPT has no '{}'; did you mean '{}'? (keys: {})", key, nearest_name(key, keys), fmt::join(keys, ", ")));
  }
  if (equals == std::string::npos) throw ConfigError(fmt::format("'{}' has no value: write {}=...", key, key));
  setter->second(config, pair.substr(equals + 1));
}

}  // namespace

std::vector<std::string> gpt_names() {
  std::vector<std::string> names;
  for (const auto& preset : presets()) names.push_back(preset.first);
  return names;
}

GptConfig gpt_config(const std::string& name, const std::string& text) {
  const GptConfig* found = nullptr;
  for (const auto& preset : presets()) {
    if (preset.first == name) found = &preset.second;
  }
  if (found == nullptr) throw ConfigError(fmt::format("there is no model '{}'; did you mean '{}'?", name, nearest_name(name, gpt_names())));
  GptConfig config = *found;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    set_pair(config, text.substr(begin, end - begin));
    begin = end + 1;
  }
  num_parameters(config);  // checks the sizes
  return config;
}

std::int64_t num_parameters(const GptConfig& config) {
  const std::int64_t width = config.n_embd;
  if (config.n_layer < 1 || config.n_head < 1 || width < 1 || config.block_size < 1 || config.vocab_size < 1) {
    throw ConfigError("every size of a GPT must be at least 1");
  }
  if (width % config.n_head != 0) {
    throw ConfigError(fmt::format("n_embd {} is not a multiple of n_head {}; the nearest that is: {}", width, config.n_head,
                                  (width / config.n_head + 1) * config.n_head));
  }
  const std::int64_t norm = config.bias ? 2 * width : width;
  const std::int64_t biases = config.bias ? (3 + 1 + 4 + 1) * width : 0;
  const std::int64_t block = 2 * norm + (3 + 1 + 4 + 4) * width * width + biases;
  return (config.vocab_size + config.block_size) * width + config.n_layer * block + norm;
}

}  // namespace headroom
