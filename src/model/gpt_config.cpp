#include <headroom/core/error.h>
#include <headroom/model/gpt.h>
#include "model/config_text.h"
#include "model/family.h"
#include "model/gpt_published.h"

#include <fmt/format.h>

namespace headroom {
namespace {

const Presets<GptConfig>& gpt_presets() {
  static const Presets<GptConfig> all = [] {
    const auto gpt2 = [](std::int64_t n_layer, std::int64_t n_head, std::int64_t n_embd) {
      GptConfig config;
      config.n_layer = n_layer;
      config.n_head = n_head;
      config.n_embd = n_embd;
      config.block_size = 1024;
      config.vocab_size = 50257;
      return config;
    };
    return Presets<GptConfig>{{"gpt", GptConfig()},
                              {"gpt2", gpt2(12, 12, 768)},
                              {"gpt2-medium", gpt2(24, 16, 1024)},
                              {"gpt2-large", gpt2(36, 20, 1280)},
                              {"gpt2-xl", gpt2(48, 25, 1600)}};
  }();
  return all;
}

ConfigSetters setters_of(GptConfig& config) {
  return {
      {"n_layer", set_layers(config.n_layer)},
      {"n_head", set_size(config.n_head)},
      {"n_embd", set_size(config.n_embd)},
      {"block_size", set_size(config.block_size)},
      {"vocab_size", set_size(config.vocab_size)},
      {"dropout", set_probability(config.dropout)},
      {"bias", set_flag(config.bias)},
      {"num_labels", set_size(config.num_labels)},
      {"gelu",
       [&](const std::string& key, const std::string& value) {
         config.gelu = parse_word(key, value, "tanh", "exact") ? GeluKind::kTanh : GeluKind::kExact;
       }},
  };
}

ZooModel gpt_with_input(const GptConfig& config) {
  ModelInput input;
  input.kind = config.num_labels > 0 ? ModelInput::Kind::kTexts : ModelInput::Kind::kTokens;
  if (config.num_labels > 0) input.num_classes = config.num_labels;
  input.length = config.block_size;
  input.vocabulary = config.vocab_size;
  return {make_gpt(config), input};
}

ZooModel make_zoo_gpt(const std::string& name, const std::string& text) {
  return gpt_with_input(gpt_config(name, text));
}

ZooModel read_zoo_gpt(ConfigFile& file) { return read_published(file, gpt_with_input); }

}  // namespace

ModelFamily gpt_family() {
  GptConfig config;
  return {"next token, or classes of texts, as GPT-2",
          gpt_names(),
          keys_of(setters_of(config)),
          make_zoo_gpt,
          {"gpt2"},
          read_zoo_gpt};
}

std::vector<std::string> gpt_names() { return names_of(gpt_presets()); }

GptConfig gpt_config(const std::string& name, const std::string& text) {
  GptConfig config = find_preset(gpt_presets(), name);
  read_config("a GPT", text, setters_of(config));
  num_parameters(config);  // checks the sizes
  return config;
}

std::int64_t num_parameters(const GptConfig& config) {
  const std::int64_t width = config.n_embd;
  if (config.n_layer < 1 || config.n_head < 1 || width < 1 || config.block_size < 1 ||
      config.vocab_size < 1) {
    throw ConfigError("every size of a GPT must be at least 1");
  }
  if (width % config.n_head != 0) {
    throw ConfigError(
        fmt::format("n_embd {} is not a multiple of n_head {}; the nearest that is: {}", width,
                    config.n_head, (width / config.n_head + 1) * config.n_head));
  }
  const std::int64_t norm = config.bias ? 2 * width : width;
  const std::int64_t biases = config.bias ? (3 + 1 + 4 + 1) * width : 0;
  const std::int64_t block = 2 * norm + (3 + 1 + 4 + 4) * width * width + biases;
  return (config.vocab_size + config.block_size) * width + config.n_layer * block + norm +
         config.num_labels * width;
}

}  // namespace headroom
