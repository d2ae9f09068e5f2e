#pragma once

#include <headroom/model/chain.h>
#include <headroom/ops/transformer.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// A GPT by nanoGPT's words. The defaults are a small model for text by bytes.
struct GptConfig {
  std::int64_t n_layer = 6;
  std::int64_t n_head = 6;
  std::int64_t n_embd = 384;
  std::int64_t block_size = 256;  ///< most tokens in a row
  std::int64_t vocab_size = 256;
  double dropout = 0.0;  ///< of embeddings, attention weights and what each half of a block adds
  bool bias = true;      ///< in linear layers and norms
  GeluKind gelu = GeluKind::kTanh;  ///< as GPT-2; nanoGPT's own models use the exact one
  std::int64_t num_labels = 0;      ///< above 0: the classes of texts, instead of guessing tokens
};

/// The names that gpt_config knows: gpt, gpt2, gpt2-medium, gpt2-large, gpt2-xl.
std::vector<std::string> gpt_names();

/// The sizes of a model by name ("gpt" has the defaults above, the others those of the published
/// GPT-2), changed by `text`: "k=v,..." with the keys n_layer, n_head, n_embd, block_size,
/// vocab_size, dropout, bias (true or false), gelu (tanh or exact), num_labels. Throws ConfigError,
/// naming the nearest name or key, on what it does not know, and on sizes that do not fit each
/// other.
GptConfig gpt_config(const std::string& name, const std::string& text = {});

/// Parameters, the tied head counted once: 124,439,808 for gpt2.
std::int64_t num_parameters(const GptConfig& config);

/// Targets with this value count for nothing (padding, a prompt that is not to be learned), as in
/// PyTorch.
inline constexpr std::int64_t kGptIgnoreIndex = -100;

/// The model as a chain: "embedding", "block0", "block1", ..., "head", where the head ends in the
/// cross-entropy summed over the targets. micro.inputs[0] and micro.targets[0] are (B, T) int64, T
/// <= block_size; where rows hold several texts, micro.inputs[1] (B, T) int32 is the first place
/// that each token sees and micro.inputs[2] (B, T) int64 its place in its own text. With
/// num_labels, the head is a norm and a linear layer "score" over the token at the place
/// micro.targets[1] (B, 1), and micro.targets[0] are the classes (B). Blocks offer the options of
/// ops/transformer.h. The initial weights are GPT-2's: normal with deviation 0.02, projections into
/// the residual 0.02 / sqrt(2 n_layer), from LibTorch's default generator. Throws ConfigError on
/// sizes that do not fit each other.
Chain make_gpt(const GptConfig& config);

}  // namespace headroom
