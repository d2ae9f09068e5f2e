#include "data/split_pattern.h"

#include "data/unicode.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <utility>

namespace headroom {
namespace {

// The class of the character at `position`, and where the next one starts.
struct Character {
  CharacterClass kind;
  std::size_t end;
};

Character character_at(std::string_view text, std::size_t position) {
  const CodePoint point = code_point_at(text, position);
  return {class_of(point.value), position + point.num_bytes};
}

bool is_line_end(char byte) { return byte == '\n' || byte == '\r'; }

std::size_t end_of_run(std::string_view text, std::size_t position, CharacterClass kind) {
  while (position < text.size()) {
    const Character next = character_at(text, position);
    if (next.kind != kind) break;
    position = next.end;
  }
  return position;
}

// 's 't 'm 'd 're 've 'll at the start of a text that starts with an apostrophe; 0 where there is
// none.
std::size_t contraction(std::string_view text, bool any_case) {
  const auto letter = [&](std::size_t index) {
    const char byte = index < text.size() ? text[index] : '\0';
    return any_case && byte >= 'A' && byte <= 'Z' ? static_cast<char>(byte - 'A' + 'a') : byte;
  };
  const char first = letter(1), second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  const bool is_pair = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
                       (first == 'l' && second == 'l');
  if (is_pair) return 3;
  const bool is_long_s = any_case && text.substr(1, 2) == "\u017F";  // its upper case is S
  return is_long_s ? 3 : 0;
}

// \s+(?!\S)|\s+ at a text that starts with a blank: the last blank before a word belongs to the
// word, or stands alone.
std::size_t blanks(std::string_view text) {
  const std::size_t end = end_of_run(text, 0, CharacterClass::kSpace);
  if (end == text.size()) return end;
  const std::size_t last = start_of_last(text, end);
  return last > 0 ? last : end;
}

// [^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,kMostDigits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// after contractions in any case.
template <int kMostDigits>
std::size_t first_word_of_gpt4(std::string_view text) {
  if (text[0] == '\'') {
    const std::size_t end = contraction(text, true);
    if (end > 0) return end;
  }
  const Character first = character_at(text, 0);
  if (first.kind == CharacterClass::kLetter)
    return end_of_run(text, first.end, CharacterClass::kLetter);
  if (first.kind == CharacterClass::kNumber) {
    std::size_t end = first.end;
    for (int count = 1; count < kMostDigits && end < text.size(); ++count) {
      const Character next = character_at(text, end);
      if (next.kind != CharacterClass::kNumber) break;
      end = next.end;
    }
    return end;
  }
  const Character second = first.end < text.size() ? character_at(text, first.end)
                                                   : Character{CharacterClass::kSpace, 0};
  if (second.kind == CharacterClass::kLetter && !is_line_end(text[0]))
    return end_of_run(text, second.end, CharacterClass::kLetter);
  const bool blank_before_other = text[0] == ' ' && second.kind == CharacterClass::kOther;
  if (first.kind == CharacterClass::kOther || blank_before_other) {
    std::size_t end = end_of_run(text, first.end, CharacterClass::kOther);
    while (end < text.size() && is_line_end(text[end])) ++end;
    return end;
  }
  const std::size_t end = end_of_run(text, 0, CharacterClass::kSpace);
  const std::size_t line_end = text.substr(0, end).find_last_of("\r\n");
  return line_end != std::string_view::npos ? line_end + 1 : blanks(text);
}

}  // namespace

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t first_word_of_gpt2(std::string_view text) {
  if (text[0] == '\'') {
    const std::size_t end = contraction(text, false);
    if (end > 0) return end;
  }
  const Character first = character_at(text, 0);
  if (first.kind != CharacterClass::kSpace) return end_of_run(text, first.end, first.kind);
  if (text[0] == ' ' && text.size() > 1) {
    const Character second = character_at(text, 1);
    if (second.kind != CharacterClass::kSpace) return end_of_run(text, second.end, second.kind);
  }
  return blanks(text);
}

std::size_t first_word_of_qwen2(std::string_view text) { return first_word_of_gpt4<1>(text); }

FirstWord split_pattern(const std::string& regular_expression) {
  static const std::array<std::pair<const char*, FirstWord>, 5> kPatterns = {{
      {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
       first_word_of_gpt2},
      {R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
       first_word_of_gpt2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
       R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       first_word_of_gpt4<3>},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
       R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       first_word_of_qwen2},
      {R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
       R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       first_word_of_gpt4<3>},
  }};
  for (const auto& [text, function] : kPatterns) {
    if (regular_expression == text) return function;
  }
  throw DataError(fmt::format(
      "the split pattern {} is not known: those of GPT-2, GPT-4, Llama 3 and Qwen 2 are",
      regular_expression));
}

}  // namespace headroom
