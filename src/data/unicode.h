#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace headroom {

/// A byte that is no UTF-8 is kept as a code point beyond Unicode's, so that any bytes survive.
inline constexpr char32_t kFirstRawByte = 0x110000;

struct CodePoint {
  char32_t value = 0;
  std::size_t num_bytes = 0;
};

/// The code point that starts at `position`, which must be within the text. Surrogates, overlong
/// forms and truncated ones are no UTF-8: their bytes are code points of their own.
CodePoint code_point_at(std::string_view text, std::size_t position);

/// The first byte that is no UTF-8; nothing when all are.
std::optional<std::size_t> first_byte_outside_utf8(std::string_view text);

/// Where the code point that ends at `end` (> 0) begins.
std::size_t start_of_last(std::string_view text, std::size_t end);

/// Appends a code point as UTF-8, or the byte that it stands for.
void append_utf8(std::string& text, char32_t value);

/// As the split patterns of tokenizers see characters: \p{L}, \p{N}, \s and the rest. Bytes that
/// are no UTF-8 belong to the rest.
enum class CharacterClass : std::uint8_t { kOther, kLetter, kNumber, kSpace };
CharacterClass class_of(char32_t value);

bool is_space(char32_t value);        ///< Unicode's White_Space
bool is_punctuation(char32_t value);  ///< a category P*, or any ASCII character that is no letter,
                                      ///< digit, blank or control (as BERT has it)
bool is_control(char32_t value);      ///< categories Cc, Cf, Co, but no tab or line end
bool is_nonspacing_mark(char32_t value);  ///< category Mn
bool is_mark(char32_t value);             ///< categories M*
bool is_word_character(char32_t value);   ///< \w

/// Lower case without regard to neighbours, appended.
void append_lower_case(std::string& text, char32_t value);

enum class NormalForm : std::uint8_t { kNfc, kNfd, kNfkc, kNfkd };
/// Bytes that are no UTF-8 stay where they are. The time is n log n in the worst case.
std::string normalize(std::string_view text, NormalForm form);

}  // namespace headroom
