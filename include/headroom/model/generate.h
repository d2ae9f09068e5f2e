#pragma once

#include <headroom/model/chain.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace headroom {

struct GenerateOptions {
  std::int64_t num_tokens = 100;  ///< at most
  double temperature = 1.0;       ///< 0: always the likeliest token
  std::int64_t top_k = 0;         ///< draw among the k likeliest; 0: among all
  std::uint64_t seed = 0;
  std::optional<std::int64_t> stop_token;  ///< the text ends when this is drawn; it is returned too
  std::function<void(std::int64_t token)> on_token;  ///< called with every token as it is drawn
  bool use_cache = true;  ///< false: the whole text is computed again for every token
};

/// True when `chain` is a language model of the zoo that continues text: a GPT or a Llama.
bool can_generate(const Chain& chain);

/// Continues `prompt` (at least one token) and returns the new tokens alone.
///
/// Every block keeps the keys and values of the tokens so far, so that a token costs what one token
/// costs: 2 x (channels of keys) floats per block and token of room, for the prompt and num_tokens
/// but no more than the model has positions, allocated at the start. A text longer than that is
/// continued from its last tokens, all of which are then computed again for each new one.
///
/// LibTorch's random state and the training mode of the chain stay as they are. Throws ConfigError
/// when the chain cannot generate, or when an option makes no sense.
std::vector<std::int64_t> generate(const Chain& chain, const std::vector<std::int64_t>& prompt,
                                   const GenerateOptions& options = {});

}  // namespace headroom
