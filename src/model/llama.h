#pragma once

#include <headroom/model/chain.h>
#include <headroom/ops/transformer.h>
#include "model/config_file.h"
#include "model/published.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// A language model of the Llama family (Llama, Qwen2, Mistral without its window) by Hugging
/// Face's words. The defaults are a small one for text by bytes.
struct LlamaConfig {
  std::int64_t hidden_size = 384;
  std::int64_t num_hidden_layers = 6;
  std::int64_t num_attention_heads = 6;
  std::int64_t num_key_value_heads = 2;  ///< a divisor of num_attention_heads
  std::optional<std::int64_t> head_dim;  ///< absent: hidden_size / num_attention_heads
  std::int64_t intermediate_size = 1024;
  std::int64_t vocab_size = 256;
  std::int64_t max_position_embeddings = 256;  ///< most tokens in a row
  std::optional<std::int64_t> length;          ///< tokens per sample; absent: all positions
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  std::optional<RotaryScaling> rope_scaling;  ///< of the kind "llama3"
  bool tie_word_embeddings = true;            ///< the head uses the weight of the embedding
  bool attention_bias = false;                ///< of queries, keys and values, as in Qwen2
  bool attention_output_bias = false;         ///< of the projection after them; Llama's
                                              ///< attention_bias means both
  std::int64_t num_labels = 0;  ///< above 0: the classes of texts, instead of guessing tokens
};

/// The names that llama_config knows: llama, llama-3.2-1b, qwen2-0.5b, tinyllama-1.1b.
std::vector<std::string> llama_names();

/// The sizes of a model by name ("llama" has the defaults above, the others those of the published
/// ones, with 1024 tokens per sample), changed by `text`: "k=v,..." with the names of the members
/// as keys; those of rope_scaling are rope_factor, rope_low_freq_factor, rope_high_freq_factor and
/// rope_original_max_position_embeddings. Throws ConfigError, naming the nearest name or key, on
/// what it does not know, and on sizes that do not fit each other.
LlamaConfig llama_config(const std::string& name, const std::string& text = {});

/// A tied head counted once: 1,235,814,400 for llama-3.2-1b. Throws ConfigError on sizes that do
/// not fit each other.
std::int64_t num_parameters(const LlamaConfig& config);

/// Channels of a head, and tokens per sample.
std::int64_t head_size(const LlamaConfig& config);
std::int64_t sample_length(const LlamaConfig& config);

/// The model as a chain: "embedding", "block0", "block1", ..., "head", where the head ends in the
/// cross-entropy summed over the targets. micro.inputs[0] and micro.targets[0] are (B, T) int64, T
/// <= max_position_embeddings; targets of -100 count for nothing. With num_labels, the head is a
/// norm and a linear layer "score" over the token at the place micro.targets[1] (B, 1), and
/// micro.targets[0] are the classes (B). Blocks are pre-norm with RMS
/// norms, rotary positions and SwiGLU, and offer the options of ops/transformer.h. The initial
/// weights are normal with deviation 0.02, from LibTorch's default generator; norms start at 1,
/// biases at 0. Throws ConfigError on sizes that do not fit each other.
///
/// Parameters, with C = hidden_size, F = intermediate_size, V = vocab_size, H heads of queries, K
/// of keys and values, D channels each; linear weights are (out, in):
///   embedding.embed_tokens.weight            (V, C)
///   blockN.input_layernorm.weight            (C)
///   blockN.self_attn.qkv_proj.weight, .bias  ((H + 2 K) D, C), ((H + 2 K) D)
///   blockN.self_attn.o_proj.weight, .bias    (C, H D), (C)
///   blockN.post_attention_layernorm.weight   (C)
///   blockN.mlp.gate_up_proj.weight           (2 F, C)
///   blockN.mlp.down_proj.weight              (C, F)
///   head.norm.weight, head.lm_head.weight    (C), (V, C): the second only where it is not tied
///   head.norm.weight, head.score.weight      (C), (num_labels, C), of a classifier
Chain make_llama(const LlamaConfig& config);

/// Reads config.json into the config, or writes it. Throws ConfigError.
void exchange(ConfigFile& file, LlamaConfig& config);
/// The names and shapes of the weights in Hugging Face's model. `file` holds keys of others that
/// config.json keeps.
PublishedForm make_form(const LlamaConfig& config, ConfigFile file = {});

}  // namespace headroom
