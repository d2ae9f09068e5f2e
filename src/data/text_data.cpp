#include "data/text_data.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace headroom {

std::shared_ptr<const Tokenizer> tokenizer_of(const DataRequest& request) {
  return request.tokenizer.empty() ? make_byte_tokenizer() : open_tokenizer(request.tokenizer);
}

OpenedData crops_of(const Tokens& tokens, const DataRequest& request, std::int64_t mask_token) {
  const ModelInput& input = request.input;
  const std::int64_t num_train = tokens->size() - tokens->size() / 10;
  const std::int64_t num_crops = std::max<std::int64_t>(1, num_train / input.length);
  const std::optional<Masking> masking = masking_of(input, mask_token, request.order_seed);
  OpenedData data;
  data.train = make_random_crops(part_of(tokens, 0, num_train), input.length, input.vocabulary,
                                 num_crops, request.order_seed, masking);
  if (tokens->size() - num_train > input.length) {
    data.eval = make_crops_in_order(part_of(tokens, num_train, tokens->size()), input.length,
                                    input.vocabulary, masking);
  }
  return data;
}

std::int64_t mask_token_beside(const Tokenizer& tokenizer, const DataRequest& request) {
  const ModelInput& input = request.input;
  const std::optional<std::int64_t> own = tokenizer.special_tokens().mask;
  const bool needs_mask = input.num_masked > 0 && !own && input.mask_token < tokenizer.vocabulary();
  const std::int64_t num_needed = tokenizer.vocabulary() + (needs_mask ? 1 : 0);
  if (num_needed > input.vocabulary) {
    throw ConfigError(fmt::format(
        "the tokenizer has {} tokens{}, but model {} knows {}; set vocab_size={} in --model_config",
        tokenizer.vocabulary(), needs_mask ? " beside the mask" : "", request.model,
        input.vocabulary, num_needed));
  }
  return needs_mask ? tokenizer.vocabulary() : own.value_or(input.mask_token);
}

}  // namespace headroom
