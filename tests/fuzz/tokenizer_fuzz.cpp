// A tokenizer.json and a text by their bytes: refused with a DataError, or the tokens are within
// the vocabulary and decode. The text follows the first NUL byte.
#include "data/tokenizer_parts.h"

#include <headroom/core/error.h>

#include <cstdint>
#include <cstdlib>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  const std::string input(reinterpret_cast<const char*>(data), size);
  const std::string content = input.substr(0, input.find('\0'));
  const std::string text = content.size() < input.size() ? input.substr(content.size() + 1) : input;
  try {
    const auto tokenizer = compose_tokenizer(parse_tokenizer_json(content, "input"));
    const std::vector<std::int64_t> tokens = tokenizer->encode(text);
    for (const std::int64_t token : tokens) {
      if (token < 0 || token >= tokenizer->vocabulary()) std::abort();
    }
    tokenizer->decode(tokens);
    tokenizer->with_special_tokens(tokens, tokens);
  } catch (const DataError&) {
    // what a bad file is answered with
  }
  return 0;
}
