#include "model/llama.h"

#include <headroom/core/error.h>

#include "model/config_text.h"
#include "model/family.h"

#include <fmt/format.h>

namespace headroom {
namespace {

const Presets<LlamaConfig>& llama_presets() {
  static const Presets<LlamaConfig> all = [] {
    LlamaConfig llama32;
    llama32.hidden_size = 2048;
    llama32.num_hidden_layers = 16;
    llama32.num_attention_heads = 32;
    llama32.num_key_value_heads = 8;
    llama32.intermediate_size = 8192;
    llama32.vocab_size = 128256;
    llama32.max_position_embeddings = 131072;
    llama32.length = 1024;
    llama32.rope_theta = 500000.0;
    llama32.rope_scaling = RotaryScaling{32.0, 1.0, 4.0, 8192};
    LlamaConfig qwen2;
    qwen2.hidden_size = 896;
    qwen2.num_hidden_layers = 24;
    qwen2.num_attention_heads = 14;
    qwen2.num_key_value_heads = 2;
    qwen2.intermediate_size = 4864;
    qwen2.vocab_size = 151936;
    qwen2.max_position_embeddings = 131072;
    qwen2.length = 1024;
    qwen2.rms_norm_eps = 1e-6;
    qwen2.rope_theta = 1e6;
    qwen2.attention_bias = true;
    LlamaConfig tiny;
    tiny.hidden_size = 2048;
    tiny.num_hidden_layers = 22;
    tiny.num_attention_heads = 32;
    tiny.num_key_value_heads = 4;
    tiny.intermediate_size = 5632;
    tiny.vocab_size = 32000;
    tiny.max_position_embeddings = 2048;
    tiny.length = 1024;
    tiny.tie_word_embeddings = false;
    return Presets<LlamaConfig>{{"llama", LlamaConfig()},
                                {"llama-3.2-1b", llama32},
                                {"qwen2-0.5b", qwen2},
                                {"tinyllama-1.1b", tiny}};
  }();
  return all;
}

// A setter for a member of rope_scaling, which is there from the first one on.
template <class Set, class Number>
ConfigSetter set_scaling(LlamaConfig& config, Set set, Number RotaryScaling::*member) {
  return [&config, set, member](const std::string& key, const std::string& value) {
    if (!config.rope_scaling) config.rope_scaling.emplace();
    set((*config.rope_scaling).*member)(key, value);
  };
}

ConfigSetters setters_of(LlamaConfig& config) {
  const auto optional_size = [](std::optional<std::int64_t>& member) -> ConfigSetter {
    return [&member](const std::string& key, const std::string& value) {
      set_size(member.emplace())(key, value);
    };
  };
  return {
      {"hidden_size", set_size(config.hidden_size)},
      {"num_hidden_layers", set_layers(config.num_hidden_layers)},
      {"num_attention_heads", set_size(config.num_attention_heads)},
      {"num_key_value_heads", set_size(config.num_key_value_heads)},
      {"head_dim", optional_size(config.head_dim)},
      {"intermediate_size", set_size(config.intermediate_size)},
      {"vocab_size", set_size(config.vocab_size)},
      {"max_position_embeddings", set_size(config.max_position_embeddings)},
      {"length", optional_size(config.length)},
      {"rms_norm_eps", set_positive(config.rms_norm_eps)},
      {"rope_theta", set_positive(config.rope_theta)},
      {"rope_factor", set_scaling(config, set_positive, &RotaryScaling::factor)},
      {"rope_low_freq_factor",
       set_scaling(config, set_positive, &RotaryScaling::low_frequency_factor)},
      {"rope_high_freq_factor",
       set_scaling(config, set_positive, &RotaryScaling::high_frequency_factor)},
      {"rope_original_max_position_embeddings",
       set_scaling(config, set_size, &RotaryScaling::original_length)},
      {"tie_word_embeddings", set_flag(config.tie_word_embeddings)},
      {"attention_bias", set_flag(config.attention_bias)},
      {"attention_output_bias", set_flag(config.attention_output_bias)},
      {"num_labels", set_size(config.num_labels)},
  };
}

void check(const LlamaConfig& config) {
  const std::int64_t heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  if (config.hidden_size < 1 || config.num_hidden_layers < 1 || heads < 1 || kv_heads < 1 ||
      config.intermediate_size < 1 || config.vocab_size < 1 || config.max_position_embeddings < 1) {
    throw ConfigError("every size of a Llama must be at least 1");
  }
  if (heads % kv_heads != 0) {
    throw ConfigError(fmt::format(
        "num_attention_heads {} is not a multiple of num_key_value_heads {}: each head of keys "
        "serves as many heads of queries",
        heads, kv_heads));
  }
  if (!config.head_dim && config.hidden_size % heads != 0) {
    throw ConfigError(fmt::format(
        "hidden_size {} is not a multiple of num_attention_heads {}; the nearest that is: {}, or "
        "give head_dim",
        config.hidden_size, heads, (config.hidden_size / heads + 1) * heads));
  }
  if (head_size(config) % 2 != 0) {
    throw ConfigError(fmt::format(
        "a head of {} channels cannot be turned by rotary positions: give an even number",
        head_size(config)));
  }
  if (sample_length(config) > config.max_position_embeddings) {
    throw ConfigError(fmt::format(
        "length {} is more than the {} positions of the model: raise max_position_embeddings",
        sample_length(config), config.max_position_embeddings));
  }
  if (config.rope_scaling &&
      config.rope_scaling->high_frequency_factor <= config.rope_scaling->low_frequency_factor) {
    throw ConfigError(fmt::format("rope_high_freq_factor {} is not above rope_low_freq_factor {}",
                                  config.rope_scaling->high_frequency_factor,
                                  config.rope_scaling->low_frequency_factor));
  }
}

ZooModel llama_with_input(const LlamaConfig& config) {
  ModelInput input;
  input.kind = config.num_labels > 0 ? ModelInput::Kind::kTexts : ModelInput::Kind::kTokens;
  if (config.num_labels > 0) input.num_classes = config.num_labels;
  input.length = sample_length(config);
  input.vocabulary = config.vocab_size;
  return {make_llama(config), input};
}

ZooModel make_zoo_llama(const std::string& name, const std::string& text) {
  return llama_with_input(llama_config(name, text));
}

ZooModel read_zoo_llama(ConfigFile& file) { return read_published(file, llama_with_input); }

}  // namespace

ModelFamily llama_family() {
  LlamaConfig config;
  return {"next token, or classes of texts, as Llama and Qwen2",
          llama_names(),
          keys_of(setters_of(config)),
          make_zoo_llama,
          {"llama", "qwen2"},
          read_zoo_llama};
}

std::vector<std::string> llama_names() { return names_of(llama_presets()); }

LlamaConfig llama_config(const std::string& name, const std::string& text) {
  LlamaConfig config = find_preset(llama_presets(), name);
  read_config("a Llama", text, setters_of(config));
  check(config);
  return config;
}

std::int64_t head_size(const LlamaConfig& config) {
  return config.head_dim.value_or(config.hidden_size / config.num_attention_heads);
}

std::int64_t sample_length(const LlamaConfig& config) {
  return config.length.value_or(config.max_position_embeddings);
}

std::int64_t num_parameters(const LlamaConfig& config) {
  check(config);
  const std::int64_t width = config.hidden_size, size = head_size(config),
                     heads = config.num_attention_heads,
                     qkv = (heads + 2 * config.num_key_value_heads) * size;
  const std::int64_t attention = qkv * width + width * heads * size +
                                 (config.attention_bias ? qkv : 0) +
                                 (config.attention_output_bias ? width : 0);
  const std::int64_t block = attention + 3 * width * config.intermediate_size + 2 * width;
  const std::int64_t embedding = config.vocab_size * width,
                     head = config.num_labels > 0        ? config.num_labels * width
                            : config.tie_word_embeddings ? 0
                                                         : embedding;
  return embedding + config.num_hidden_layers * block + width + head;
}

}  // namespace headroom
