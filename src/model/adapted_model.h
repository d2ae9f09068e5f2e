#pragma once

// A folder with adapters in PEFT's layout, as a model.

#include <headroom/model/chain.h>

#include <string>

namespace headroom {

/// The folder of the model that the adapters of `folder` are for. Throws DataError when there is
/// none.
std::string base_of_adapters(const std::string& folder);

/// Trains the head beside the adapters: everything of it that a folder may lack.
void train_head(const Chain& chain);

/// Adds the folder's adapters to its base model, and merges them. Throws DataError, before weights
/// are changed, when the files are malformed or the adapters are not those of the config.
void load_and_merge_adapters(Chain& chain, const std::string& folder);

}  // namespace headroom
