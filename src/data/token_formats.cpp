#include "data/data_format.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

bool is_token_file(const std::string& dataset) {
  return is_regular_file(dataset) && ends_with(dataset, ".bin");
}

// The last tenth of the tokens is for evaluation. An epoch is as many random crops as it takes to
// see each token once on average.
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

// The mask is the tokenizer's own. Where it has none, the mask must be no token of the text: where
// the model's is one, it is the first that the tokenizer does not have.
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

OpenedData open_text(const DataRequest& request) {
  const bool by_bytes = request.tokenizer.empty();
  std::shared_ptr<const Tokenizer> tokenizer =
      by_bytes ? make_byte_tokenizer() : open_tokenizer(request.tokenizer);
  const std::int64_t mask_token = mask_token_beside(*tokenizer, request);
  OpenedData data = crops_of(
      by_bytes ? open_text_file(request.dataset) : open_text_file(request.dataset, *tokenizer),
      request, mask_token);
  data.tokenizer = std::move(tokenizer);
  return data;
}

}  // namespace

DataFormat token_format() {
  return {"a .bin of uint16 tokens",
          "holds tokens",
          {ModelInput::Kind::kTokens},
          false,
          is_token_file,
          [](const DataRequest& request) {
            return crops_of(open_token_file(request.dataset), request, request.input.mask_token);
          }};
}

DataFormat text_format() {
  return {"a text file", "is a text file", {ModelInput::Kind::kTokens},
          true,          is_regular_file,  open_text};
}

}  // namespace headroom
