#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace headroom {

/// Where the first word of a text, which is not empty, ends.
using FirstWord = std::size_t (*)(std::string_view text);

/// The pattern of GPT-2, which byte-level tokenizers use unless they bring their own.
std::size_t first_word_of_gpt2(std::string_view text);
std::size_t first_word_of_qwen2(std::string_view text);

/// The function that splits as a regular expression does. The patterns of GPT-2, of GPT-4 and
/// Llama 3, and of Qwen 2 are known by their text. Throws DataError, naming the pattern, for any
/// other.
FirstWord split_pattern(const std::string& regular_expression);

}  // namespace headroom
