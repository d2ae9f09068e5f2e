#include "data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

namespace headroom {
namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

utf8proc_category_t category_of(char32_t value) {
  return value < kFirstRawByte ? utf8proc_category(static_cast<utf8proc_int32_t>(value))
                               : UTF8PROC_CATEGORY_SO;
}

bool is_between(utf8proc_category_t category, utf8proc_category_t first, utf8proc_category_t last) {
  return category >= first && category <= last;
}

CharacterClass class_by_category(char32_t value) {
  if (is_space(value)) return CharacterClass::kSpace;
  const utf8proc_category_t category = category_of(value);
  if (is_between(category, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO))
    return CharacterClass::kLetter;
  if (is_between(category, UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO))
    return CharacterClass::kNumber;
  return CharacterClass::kOther;
}

std::array<CharacterClass, 128> ascii_classes() {
  std::array<CharacterClass, 128> classes{};
  for (char32_t value = 0; value < 128; ++value) classes[value] = class_by_category(value);
  return classes;
}

// Code points of one run, fully decomposed, with marks in canonical order.
void decompose(std::string_view text, bool compatibility, std::vector<utf8proc_int32_t>& out) {
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                      (compatibility ? UTF8PROC_COMPAT : 0));
  out.clear();
  for (std::size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    i += point.num_bytes;
    std::array<utf8proc_int32_t, 64> parts{};  // the longest decomposition has 18
    int last_class = UTF8PROC_BOUNDCLASS_START;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(point.value), parts.data(),
                                parts.size(), options, &last_class);
    out.insert(out.end(), parts.begin(),
               parts.begin() + std::clamp<utf8proc_ssize_t>(count, 0, 64));
  }
  const auto order_of = [](utf8proc_int32_t value) {
    return utf8proc_get_property(value)->combining_class;
  };
  // utf8proc would order marks by insertion, which is quadratic in the length of a run of marks.
  for (auto begin = out.begin(); begin != out.end();) {
    begin = std::find_if(begin, out.end(), [&](auto value) { return order_of(value) != 0; });
    const auto end =
        std::find_if(begin, out.end(), [&](auto value) { return order_of(value) == 0; });
    std::stable_sort(begin, end, [&](auto a, auto b) { return order_of(a) < order_of(b); });
    begin = end;
  }
}

}  // namespace

CodePoint code_point_at(std::string_view text, std::size_t position) {
  const auto lead = static_cast<unsigned char>(text[position]);
  if (lead < 0x80) return {lead, 1};
  const CodePoint raw{kFirstRawByte + lead, 1};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() - position < length) return raw;
  char32_t value = lead & (0x7F >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[position + i])) return raw;
    value = value << 6 | (static_cast<unsigned char>(text[position + i]) & 0x3F);
  }
  const char32_t smallest = length == 2 ? 0x80 : length == 3 ? 0x800 : 0x10000;
  const bool is_surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < smallest || value >= kFirstRawByte || is_surrogate) return raw;
  return {value, length};
}

std::optional<std::size_t> first_byte_outside_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (point.value >= kFirstRawByte) return i;
    i += point.num_bytes;
  }
  return std::nullopt;
}

std::size_t start_of_last(std::string_view text, std::size_t end) {
  for (std::size_t back = 1; back <= 4 && back <= end; ++back) {
    const std::size_t start = end - back;
    if (!is_continuation(text[start]))
      return code_point_at(text.substr(0, end), start).num_bytes == back ? start : end - 1;
  }
  return end - 1;
}

void append_utf8(std::string& text, char32_t value) {
  if (value < 0x80 || value >= kFirstRawByte) {
    text.push_back(static_cast<char>(value & 0xFF));
    return;
  }
  std::array<utf8proc_uint8_t, 4> bytes{};
  const utf8proc_ssize_t count =
      utf8proc_encode_char(static_cast<utf8proc_int32_t>(value), bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(count));
}

CharacterClass class_of(char32_t value) {
  static const std::array<CharacterClass, 128> kAscii = ascii_classes();
  return value < 128 ? kAscii[value] : class_by_category(value);
}

bool is_space(char32_t value) {
  if (value < 0x80) return value == ' ' || (value >= '\t' && value <= '\r');
  return value == 0x85 || value == 0xA0 || value == 0x1680 ||
         (value >= 0x2000 && value <= 0x200A) || value == 0x2028 || value == 0x2029 ||
         value == 0x202F || value == 0x205F || value == 0x3000;
}

bool is_punctuation(char32_t value) {
  if (value < 0x80) {
    return value > ' ' && value < 0x7F && class_of(value) == CharacterClass::kOther;
  }
  return is_between(category_of(value), UTF8PROC_CATEGORY_PC, UTF8PROC_CATEGORY_PO);
}

bool is_control(char32_t value) {
  if (value == '\t' || value == '\n' || value == '\r') return false;
  const utf8proc_category_t category = category_of(value);
  return category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF ||
         category == UTF8PROC_CATEGORY_CO;
}

bool is_nonspacing_mark(char32_t value) { return category_of(value) == UTF8PROC_CATEGORY_MN; }

bool is_mark(char32_t value) {
  return is_between(category_of(value), UTF8PROC_CATEGORY_MN, UTF8PROC_CATEGORY_ME);
}

bool is_word_character(char32_t value) {
  const utf8proc_category_t category = category_of(value);
  return is_between(category, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_NO) ||
         category == UTF8PROC_CATEGORY_PC;
}

void append_lower_case(std::string& text, char32_t value) {
  if (value >= kFirstRawByte) return append_utf8(text, value);
  if (value == 0x130) {  // the one letter that becomes two: i with a dot above
    text += "i\u0307";
    return;
  }
  append_utf8(text, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(value))));
}

std::string normalize(std::string_view text, NormalForm form) {
  const bool compatibility = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool compose = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const auto is_ascii = [](char byte) { return static_cast<unsigned char>(byte) < 0x80; };
  std::string result;
  result.reserve(text.size());
  std::vector<utf8proc_int32_t> points;
  // ASCII stays as it is, but for a character that a mark follows: runs of other characters are
  // taken together with the one before them, and end at bytes that are no UTF-8.
  for (std::size_t begin = 0; begin < text.size();) {
    const auto other =
        std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), is_ascii);
    auto first = static_cast<std::size_t>(other - text.begin());
    if (first < text.size() && first > begin) --first;
    result.append(text.substr(begin, first - begin));
    std::size_t end = first;
    if (end < text.size() && is_ascii(text[end])) ++end;
    while (end < text.size() && !is_ascii(text[end])) {
      const CodePoint point = code_point_at(text, end);
      if (point.value >= kFirstRawByte) break;
      end += point.num_bytes;
    }
    decompose(text.substr(first, end - first), compatibility, points);
    auto count = static_cast<utf8proc_ssize_t>(points.size());
    if (compose && count > 0) {
      count = utf8proc_normalize_utf32(
          points.data(), count, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    }
    for (utf8proc_ssize_t i = 0; i < count; ++i)
      append_utf8(result, static_cast<char32_t>(points[static_cast<std::size_t>(i)]));
    while (end < text.size() && code_point_at(text, end).value >= kFirstRawByte)
      result.push_back(text[end++]);
    begin = end;
  }
  return result;
}

}  // namespace headroom
