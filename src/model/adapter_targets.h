#pragma once

// Which layers of a model get adapters.

#include <cstddef>
#include <string>
#include <vector>

namespace headroom {

inline constexpr const char* kAllLinear = "all-linear";

/// The name of a linear layer by that of its weight: "h.0.c_attn" of "h.0.c_attn.weight".
std::string layer_name(const std::string& weight);

/// "c_attn" of "transformer.h.0.attn.c_attn".
std::string last_word(const std::string& name);

/// The places of the layers that the targets mean: each is the name of a layer, the end of names
/// behind a dot, or kAllLinear. Throws ConfigError, naming the nearest, when one means none.
std::vector<std::size_t> targeted_layers(const std::vector<std::string>& layers,
                                         const std::vector<std::string>& targets);

}  // namespace headroom
