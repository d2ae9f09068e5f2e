// The Llama family as Hugging Face's LlamaForCausalLM and Qwen2ForCausalLM have it, and their
// ForSequenceClassification.
#include <headroom/core/error.h>
#include "model/llama.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

constexpr const char* kQwen2 = "qwen2";
constexpr const char* kScaling = "rope_scaling";
constexpr const char* kParameters = "rope_parameters";
constexpr std::int64_t kUsualLength = 1024;  // of samples, where a model has more positions

// Newer files have the base of the angles among the numbers of the scaling, whose kind is "default"
// where there is none.
void exchange_rotary(ConfigFile& file, LlamaConfig& config) {
  const bool is_newer = file.has(kParameters);
  const char* key = is_newer ? kParameters : kScaling;
  ConfigFile(is_newer ? file.section(key) : file).number("rope_theta", config.rope_theta, 10000.0);
  if (file.is_read() ? !file.has(key) : !config.rope_scaling) return;
  ConfigFile part = file.section(key);
  std::string kind = "llama3";
  part.word("rope_type", kind, "");
  if (file.is_read() && kind.empty()) part.word("type", kind, "default");
  if (kind == "default") return;
  if (kind != "llama3") {
    throw ConfigError(fmt::format(
        "config.json: {} of type '{}' cannot be served here; known: default, llama3", key, kind));
  }
  if (!config.rope_scaling) config.rope_scaling.emplace();
  part.number("factor", config.rope_scaling->factor, 8.0);
  part.number("low_freq_factor", config.rope_scaling->low_frequency_factor, 1.0);
  part.number("high_freq_factor", config.rope_scaling->high_frequency_factor, 4.0);
  part.size("original_max_position_embeddings", config.rope_scaling->original_length, 8192);
}

// Qwen2 has biases of queries, keys and values without a key for them; Llama's key means the
// projection's as well. What neither has is said in our own section.
void exchange_biases(ConfigFile& file, LlamaConfig& config) {
  std::string type;
  if (file.is_read()) {
    file.word("model_type", type, "");
    file.head(config.num_labels, "LlamaForCausalLM", "LlamaForSequenceClassification", type);
    config.attention_bias = config.attention_output_bias = false;
    if (type == kQwen2) {
      config.attention_bias = true;
    } else {
      file.flag("attention_bias", config.attention_bias, false);
      config.attention_output_bias = config.attention_bias;
    }
  } else if (config.attention_bias && !config.attention_output_bias) {
    file.head(config.num_labels, "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", kQwen2);
  } else {
    file.head(config.num_labels, "LlamaForCausalLM", "LlamaForSequenceClassification", "llama");
    file.flag("attention_bias", config.attention_bias, false);
  }
  ConfigFile ours = file.section("headroom");
  ours.flag("attention_output_bias", config.attention_output_bias, config.attention_output_bias);
}

}  // namespace

void exchange(ConfigFile& file, LlamaConfig& config) {
  exchange_biases(file, config);
  file.size("hidden_size", config.hidden_size, 4096);
  file.size("num_hidden_layers", config.num_hidden_layers, 32, set_layers);
  file.size("num_attention_heads", config.num_attention_heads, 32);
  file.size("num_key_value_heads", config.num_key_value_heads, config.num_attention_heads);
  std::int64_t head = file.is_read() ? 0 : head_size(config);
  file.size("head_dim", head, 0);
  if (head > 0) config.head_dim = head;
  file.size("intermediate_size", config.intermediate_size, 11008);
  file.size("vocab_size", config.vocab_size, 32000);
  file.size("max_position_embeddings", config.max_position_embeddings, 2048);
  file.number("rms_norm_eps", config.rms_norm_eps, 1e-6);
  file.flag("tie_word_embeddings", config.tie_word_embeddings, false);
  exchange_rotary(file, config);
  file.only("hidden_act", std::string("silu"));
  file.only("mlp_bias", false);
  file.only("use_sliding_window", false);
  double dropout = 0.0;
  file.probability("attention_dropout", dropout, 0.0);
  if (dropout != 0.0)
    throw ConfigError("config.json: attention_dropout: a Llama here has none; set it to 0");
  std::int64_t length = sample_length(config);
  file.section("headroom")
      .size("length", length, std::min(kUsualLength, config.max_position_embeddings));
  config.length = length;
}

PublishedForm make_form(const LlamaConfig& config, ConfigFile file) {
  LlamaConfig written = config;
  exchange(file, written);
  PublishedForm form;
  form.config = file.text();
  const std::int64_t queries = config.num_attention_heads * head_size(config),
                     keys = config.num_key_value_heads * head_size(config);
  const std::string layer = "model.layers.*.", attention = layer + "self_attn.";
  form.rows = {{"embedding", {"model"}},
               {"block*.self_attn.qkv_proj",
                {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                false,
                {},
                {queries, keys, keys}},
               {"block*.mlp.gate_up_proj", {layer + "mlp.gate_proj", layer + "mlp.up_proj"}},
               {"block*", {"model.layers.*"}},
               {"head.norm", {"model.norm"}},
               {"head.lm_head", {"lm_head"}}};
  form.base = "model.";
  form.ignored = {"model.layers.*.self_attn.rotary_emb.inv_freq"};
  if (config.num_labels > 0) {
    form.rows.push_back({"head.score", {"score"}});
    form.head = {"score."};
    form.ignored.emplace_back("lm_head.weight");
    return form;
  }
  form.ignored.emplace_back("score.weight");
  if (config.tie_word_embeddings) {
    form.ties = {{"lm_head.weight", "model.embed_tokens.weight"}};
  } else {
    form.head = {"lm_head."};
  }
  return form;
}

}  // namespace headroom
