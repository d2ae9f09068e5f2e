#pragma once

#include "data/data_format.h"

#include <string>
#include <vector>

namespace headroom {

/// Images with their texts.
struct ImageTexts {
  std::vector<std::string> images;  ///< paths
  std::vector<std::string> texts;
  std::vector<std::string> places;  ///< of the texts, for messages
};

/// Samples of a contrastive model: inputs are images (B, channels, rows, columns), tokens (B, T)
/// and the place of each text's end (B, 1), where the end token stands: the tokenizer's, or the
/// last of the model's vocabulary. Longer texts are cut. Without evaluation pairs, a tenth is held
/// out. Throws DataError for a text that is no UTF-8.
OpenedData open_pairs(const DataRequest& request, ImageTexts train, ImageTexts eval);

}  // namespace headroom
