#include "data/text_steps.h"

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

// The blocks that BERT's tokenizer separates, gap included.
bool is_ideograph(char32_t value) {
  constexpr std::pair<char32_t, char32_t> kBlocks[] = {
      {0x4E00, 0x9FFF},   {0x3400, 0x4DBF},   {0x20000, 0x2A6DF}, {0x2A700, 0x2B73F},
      {0x2B740, 0x2B81F}, {0x2B920, 0x2CEAF}, {0xF900, 0xFAFF},   {0x2F800, 0x2FA1F}};
  return std::any_of(std::begin(kBlocks), std::end(kBlocks), [&](const auto& block) {
    return value >= block.first && value <= block.second;
  });
}

template <class Change>
std::string each_character(std::string_view text, const Change& append) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    append(result, point.value);
    i += point.num_bytes;
  }
  return result;
}

std::string clean(std::string_view text) {
  return each_character(text, [](std::string& out, char32_t value) {
    if (is_space(value)) {
      // Some blanks are controls as well: those are dropped, but for tab and line ends.
      if (!is_control(value)) out.push_back(' ');
    } else if (value != 0xFFFD && !is_control(value)) {
      append_utf8(out, value);
    }
  });
}

std::string separate_ideographs(std::string_view text) {
  return each_character(text, [](std::string& out, char32_t value) {
    const bool alone = is_ideograph(value);
    if (alone) out.push_back(' ');
    append_utf8(out, value);
    if (alone) out.push_back(' ');
  });
}

// Calls the sink for the parts between separators, and for separators that stand alone.
enum class Role { kPart, kAlone, kDropped };
template <class RoleOf>
void split_by_role(std::string_view text, const WordSink& sink, const RoleOf& role_of) {
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    const Role role = role_of(point.value);
    if (role != Role::kPart) {
      if (i > begin) sink(text.substr(begin, i - begin));
      if (role == Role::kAlone) sink(text.substr(i, point.num_bytes));
      begin = i + point.num_bytes;
    }
    i += point.num_bytes;
  }
  if (begin < text.size()) sink(text.substr(begin));
}

void split_numbers_from_text(std::string_view text, const WordSink& sink) {
  const auto is_number_at = [&](std::size_t i) {
    return class_of(code_point_at(text, i).value) == CharacterClass::kNumber;
  };
  for (std::size_t begin = 0; begin < text.size();) {
    const bool is_number = is_number_at(begin);
    std::size_t end = begin;
    while (end < text.size() && is_number_at(end) == is_number)
      end += code_point_at(text, end).num_bytes;
    sink(text.substr(begin, end - begin));
    begin = end;
  }
}

void split_from(const std::vector<SplitStep>& steps, std::size_t first, std::string_view text,
                const WordSink& sink) {
  if (first == steps.size()) return sink(text);
  if (first + 1 == steps.size()) return steps[first](text, sink);
  steps[first](text, [&](std::string_view word) { split_from(steps, first + 1, word, sink); });
}

}  // namespace

TextStep make_bert_cleaning(const BertCleaning& options) {
  return [options](std::string text) {
    if (options.clean_text) text = clean(text);
    if (options.separate_ideographs) text = separate_ideographs(text);
    if (options.strip_accents)
      text = without(normalize(text, NormalForm::kNfd), is_nonspacing_mark);
    if (options.lower_case) text = to_lower_case(text);
    return text;
  };
}

TextStep make_normal_form(NormalForm form) {
  return [form](const std::string& text) { return normalize(text, form); };
}

std::string to_lower_case(std::string_view text) { return each_character(text, append_lower_case); }

std::string without(std::string_view text, bool (*is_dropped)(char32_t)) {
  return each_character(text, [=](std::string& out, char32_t value) {
    if (!is_dropped(value)) append_utf8(out, value);
  });
}

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  if (from.empty() || text.find(from) == std::string::npos) return text;
  std::string result;
  std::size_t begin = 0;
  for (std::size_t at = 0; (at = text.find(from, begin)) != std::string::npos;) {
    result.append(text, begin, at - begin).append(to);
    begin = at + from.size();
  }
  return result.append(text, begin);
}

SplitStep make_pattern_split(FirstWord first_word) {
  return [first_word](std::string_view text, const WordSink& sink) {
    while (!text.empty()) {
      const std::size_t end = first_word(text);
      sink(text.substr(0, end));
      text.remove_prefix(end);
    }
  };
}

SplitStep make_space_before() {
  return [](std::string_view text, const WordSink& sink) {
    if (text.empty() || text[0] == ' ') return sink(text);
    sink(std::string(" ").append(text));
  };
}

SplitStep make_digit_split(bool individual) {
  if (!individual) return split_numbers_from_text;
  return [](std::string_view text, const WordSink& sink) {
    split_by_role(text, sink, [](char32_t value) {
      return class_of(value) == CharacterClass::kNumber ? Role::kAlone : Role::kPart;
    });
  };
}

SplitStep make_bert_split() {
  return [](std::string_view text, const WordSink& sink) {
    split_by_role(text, sink, [](char32_t value) {
      return is_space(value) ? Role::kDropped : is_punctuation(value) ? Role::kAlone : Role::kPart;
    });
  };
}

SplitStep make_blank_split() {
  return [](std::string_view text, const WordSink& sink) {
    split_by_role(text, sink,
                  [](char32_t value) { return is_space(value) ? Role::kDropped : Role::kPart; });
  };
}

SplitStep make_space_replacement(std::string replacement, bool goes_before, bool cuts) {
  return [=](std::string_view text, const WordSink& sink) {
    std::string marked = replace_all(std::string(text), " ", replacement);
    if (goes_before && marked.rfind(replacement, 0) != 0) marked.insert(0, replacement);
    const std::string_view view = marked;
    for (std::size_t begin = 0; begin < view.size();) {
      const std::size_t end = cuts ? view.find(replacement, begin + 1) : view.npos;
      sink(view.substr(begin, end == view.npos ? end : end - begin));
      begin = end == view.npos ? view.size() : end;
    }
  };
}

SplitStep make_cut_before(std::string mark) {
  return [mark](std::string_view text, const WordSink& sink) {
    std::size_t begin = 0;
    for (std::size_t at = 0; (at = text.find(mark, at)) != text.npos;) {
      if (at > begin) sink(text.substr(begin, at - begin));
      begin = at;
      while (text.substr(at, mark.size()) == mark) at += mark.size();
    }
    if (begin < text.size()) sink(text.substr(begin));
  };
}

void split(const std::vector<SplitStep>& steps, std::string_view text, const WordSink& sink) {
  if (!text.empty()) split_from(steps, 0, text, sink);
}

}  // namespace headroom
