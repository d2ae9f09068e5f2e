#pragma once

// Models with adapters, beside what adapters.h gives.

#include <headroom/model/adapters.h>

#include <string>

namespace headroom {

/// Trains the head beside the adapters: everything of it that a folder may lack.
void train_head(const Chain& chain);

/// Adds the folder's adapters to its base model, and merges them. Throws DataError, before weights
/// are changed, when the files are malformed or the adapters are not those of the config.
void load_and_merge_adapters(Chain& chain, const std::string& folder);

/// add_adapters() for a chain that was cut from a TorchScript module. False, and nothing is done,
/// where it was not.
bool add_script_adapters(Chain& chain, const LoraConfig& lora, const std::string& base,
                         const MicroBatch& example);

/// load_and_merge_adapters() for such a chain, whose stages stay as they are.
void merge_script_adapters(const Chain& chain, const std::string& folder);

}  // namespace headroom
