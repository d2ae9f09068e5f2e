#pragma once

#include <headroom/model/chain.h>
#include "model/config_file.h"
#include "model/encoder.h"
#include "model/published.h"

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// A BERT that guesses masked tokens, or classifies texts. The defaults, but for the sizes that
/// EncoderConfig has, are those of a small one for text by bytes.
struct BertConfig : EncoderConfig {
  std::int64_t max_position_embeddings = 256;
  std::int64_t vocab_size = 257;  ///< the bytes, and a mask
  std::int64_t type_vocab_size = 2;
  std::int64_t length = 0;        ///< tokens per sample; 0: max_position_embeddings
  double mlm_probability = 0.15;  ///< share of a sample's tokens that are to be guessed
  std::int64_t mask_token =
      -1;  ///< what stands for a token to be guessed; -1: the last of the vocabulary
  std::int64_t num_labels = 0;      ///< above 0: the classes of texts, instead of guessing tokens
  double classifier_dropout = 0.0;  ///< before the classifier, of one that is read from a file
};

/// The names that bert_config knows: bert, bert-base, bert-large.
std::vector<std::string> bert_names();

/// The sizes of a model by name ("bert" has width 384 and 6 layers, the others are the published
/// ones, uncased, with mask token 103 and dropout 0.1), changed by `text`: "k=v,..." with the keys
/// hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, max_position_embeddings,
/// vocab_size, type_vocab_size, hidden_dropout_prob, attention_probs_dropout_prob, dropout (both at
/// once), length, mlm_probability, mask_token, num_labels. What the defaults leave open is settled.
/// Throws ConfigError, naming the nearest name or key, on what it does not know, and on sizes that
/// do not fit each other.
BertConfig bert_config(const std::string& name, const std::string& text = {});

/// Those of Hugging Face's BertForMaskedLM, the tied decoder counted once: 109,514,298 for
/// bert-base; with num_labels, of BertForSequenceClassification.
std::int64_t num_parameters(const BertConfig& config);

/// Tokens per sample that are to be guessed: mlm_probability x length to the nearest, and at least
/// one. A function of the length alone, so that all samples have the same shapes.
std::int64_t num_masked(const BertConfig& config);

/// The model as a chain: "embedding", "block0", "block1", ..., "head", where the head takes the
/// chosen tokens alone through transform and decoder and ends in the cross-entropy summed over
/// them. micro.inputs[0] is (B, T) int64, T <= max_position_embeddings; micro.inputs[1], where it
/// is there, (B, T) bool: true for tokens, false for padding, which no token then sees.
/// micro.targets are what the chosen tokens are (B, K) and their positions (B, K); targets of -100
/// count for nothing. With num_labels, the head is a dense layer with tanh ("pooler") over the
/// token at the place micro.targets[1] (B, 1), and a classifier; micro.targets[0] are the classes
/// (B). Every token is of type 0. Blocks are post-norm with exact GELU and offer the
/// options of ops/transformer.h. The initial weights are normal with deviation 0.02, from
/// LibTorch's default generator; norms start at 1, biases at 0. Throws ConfigError on sizes that do
/// not fit each other.
Chain make_bert(const BertConfig& config);

/// Reads config.json into the config, or writes it. Throws ConfigError.
void exchange(ConfigFile& file, BertConfig& config);
/// The names and shapes of the weights in Hugging Face's model. `file` holds keys of others that
/// config.json keeps.
PublishedForm make_form(const BertConfig& config, ConfigFile file = {});

}  // namespace headroom
