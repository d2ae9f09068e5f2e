#pragma once

#include <headroom/model/chain.h>
#include <headroom/ops/transformer.h>
#include "model/config_file.h"
#include "model/encoder.h"
#include "model/published.h"

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Two towers, one for images and one for texts, that learn which belong together. The defaults are
/// a small one for images of 28 x 28 and texts by bytes.
struct ClipConfig {
  EncoderConfig vision, text;
  GeluKind vision_gelu = GeluKind::kExact, text_gelu = GeluKind::kExact;
  std::int64_t patch_size = 4;
  std::int64_t channels = 1;
  std::int64_t rows = 28;  ///< multiples of patch_size, as columns
  std::int64_t columns = 28;
  std::int64_t vocab_size = 257;
  std::int64_t length = 32;  ///< tokens of a text
  std::int64_t projection_dim = 64;
};

/// The names that clip_config knows: clip, clip-vit-b32.
std::vector<std::string> clip_names();

/// The sizes of a model by name ("clip" has the defaults above, the other those of the published
/// one), changed by `text`: "k=v,..." with the keys of EncoderConfig and "dropout" after vision_
/// and text_ (vision_hidden_size, ...), patch_size, image_size (rows and columns at once), rows,
/// columns, channels, vocab_size, length, projection_dim, gelu (exact or quick). Throws
/// ConfigError, naming the nearest name or key, on what it does not know, and on sizes that do not
/// fit each other.
ClipConfig clip_config(const std::string& name, const std::string& text = {});

/// 151,277,313 for clip-vit-b32.
std::int64_t num_parameters(const ClipConfig& config);

/// The model as a chain: "vision_embedding", "vision_block0", ..., "vision_head", "text_embedding",
/// "text_block0", ..., "head", where the head ends in the contrastive loss: cross-entropy of each
/// image against all texts of the batch and of each text against all images, their mean summed over
/// the samples. Every sample is compared with all others, so that the chain couples samples: a
/// batch cannot be split. Outside of training the number of images whose own text is the likeliest
/// comes second. micro.inputs are images (B, channels, rows, columns), tokens (B, length) int64 and
/// the place of each text's end (B, 1) int64, whose output stands for the text. Blocks are pre-norm
/// and offer the options of ops/transformer.h; those of the text are causal. Throws
/// ConfigError on sizes that do not fit each other.
Chain make_clip(const ClipConfig& config);

/// Reads config.json into the config, or writes it. Throws ConfigError.
void exchange(ConfigFile& file, ClipConfig& config);
/// The names and shapes of the weights in Hugging Face's model. `file` holds keys of others that
/// config.json keeps.
PublishedForm make_form(const ClipConfig& config, ConfigFile file = {});

}  // namespace headroom
