#pragma once

#include <headroom/model/chain.h>
#include "model/config_file.h"
#include "model/encoder.h"
#include "model/published.h"

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// A vision transformer that classifies images. The defaults are a small one for images of 28 x 28.
struct VitConfig : EncoderConfig {
  std::int64_t patch_size = 4;
  std::int64_t channels = 1;
  std::int64_t rows = 28;  ///< multiples of patch_size, as columns
  std::int64_t columns = 28;
  std::int64_t classes = 10;
  double layer_norm_eps = 1e-6;
};

/// The names that vit_config knows: vit, vit-b16, vit-l16.
std::vector<std::string> vit_names();

/// The sizes of a model by name ("vit" has the defaults above, the others those of the published
/// ones at 3 x 224 x 224 and 1000 classes), changed by `text`: "k=v,..." with the keys hidden_size,
/// num_hidden_layers, num_attention_heads, intermediate_size, patch_size, image_size (rows and
/// columns at once), rows, columns, channels, classes, hidden_dropout_prob,
/// attention_probs_dropout_prob, dropout (both at once). Throws ConfigError, naming the nearest
/// name or key, on what it does not know, and on sizes that do not fit each other.
VitConfig vit_config(const std::string& name, const std::string& text = {});

/// 86,567,656 for vit-b16.
std::int64_t num_parameters(const VitConfig& config);

/// The model as a chain: "embedding" (patches, class token, learned positions), "block0", "block1",
/// ..., "head" (norm, classifier and cross-entropy summed over the samples). micro.inputs[0] is (B,
/// channels, rows, columns), micro.targets[0] (B) int64. Blocks are pre-norm with exact GELU and
/// offer the options of ops/transformer.h. The initial weights are normal with deviation 0.02, from
/// LibTorch's default generator; norms start at 1, biases at 0. Throws ConfigError on sizes that do
/// not fit each other.
Chain make_vit(const VitConfig& config);

/// Reads config.json into the config, or writes it. Throws ConfigError.
void exchange(ConfigFile& file, VitConfig& config);
/// The names and shapes of the weights in Hugging Face's model. `file` holds keys of others that
/// config.json keeps.
PublishedForm make_form(const VitConfig& config, ConfigFile file = {});

}  // namespace headroom
