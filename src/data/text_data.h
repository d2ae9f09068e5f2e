#pragma once

// What the formats of text share.

#include "data/data_format.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// The tokenizer that a request names, or bytes.
std::shared_ptr<const Tokenizer> tokenizer_of(const DataRequest& request);

/// What stands for a token to be guessed, where the model guesses. The mask is the tokenizer's own;
/// where it has none, the mask must be no token of the text: where the model's is one, it is the
/// first that the tokenizer does not have. Throws ConfigError when the model knows fewer tokens
/// than the tokenizer has, and the mask.
std::int64_t mask_token_beside(const Tokenizer& tokenizer, const DataRequest& request);

/// Crops of tokens, the last tenth of which is for evaluation. An epoch is as many random crops as
/// it takes to see each token once on average.
OpenedData crops_of(const Tokens& tokens, const DataRequest& request, std::int64_t mask_token);

/// Tokens in memory; `name` is for messages.
Tokens make_token_list(std::string name, std::vector<std::int32_t> tokens);

}  // namespace headroom
