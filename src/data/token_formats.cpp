#include "core/input_file.h"
#include "core/text.h"
#include "data/text_data.h"

namespace headroom {
namespace {

bool is_token_file(const std::string& dataset) {
  return is_regular_file(dataset) && ends_with(dataset, ".bin");
}

OpenedData open_text(const DataRequest& request) {
  const bool by_bytes = request.tokenizer.empty();
  std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(request);
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
