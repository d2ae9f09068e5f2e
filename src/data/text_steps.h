#pragma once

#include "data/split_pattern.h"
#include "data/unicode.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// A change of text before it is split, such as a normal form.
using TextStep = std::function<std::string(std::string)>;

/// What BERT does with a text before it splits it, in this order.
struct BertCleaning {
  bool clean_text = true;           ///< controls are dropped, every kind of blank becomes a space
  bool separate_ideographs = true;  ///< spaces around Chinese characters
  bool strip_accents = true;
  bool lower_case = true;
};
TextStep make_bert_cleaning(const BertCleaning& options);

TextStep make_normal_form(NormalForm form);
std::string to_lower_case(std::string_view text);
/// Drops the characters that `is_dropped` is true of.
std::string without(std::string_view text, bool (*is_dropped)(char32_t));
std::string replace_all(std::string text, std::string_view from, std::string_view to);

/// Receives the words of a text in order.
using WordSink = std::function<void(std::string_view)>;
/// A division of text into words: calls the sink for each, which may be part of another text.
using SplitStep = std::function<void(std::string_view text, const WordSink& sink)>;

/// Words by a pattern.
SplitStep make_pattern_split(FirstWord first_word);
/// A space before a text that does not start with one.
SplitStep make_space_before();
/// Numbers stand alone: each digit, or digits in a row.
SplitStep make_digit_split(bool individual);
/// Blanks are dropped, punctuation stands alone.
SplitStep make_bert_split();
/// Blanks are dropped.
SplitStep make_blank_split();

/// Spaces become `replacement`, which a text starts with if `goes_before`; where `cuts`, it starts
/// a word.
SplitStep make_space_replacement(std::string replacement, bool goes_before, bool cuts);
/// Cuts before runs of `mark`, which stay with what follows them.
SplitStep make_cut_before(std::string mark);

/// Carries out the steps one after the other, each on the words of the one before.
void split(const std::vector<SplitStep>& steps, std::string_view text, const WordSink& sink);

}  // namespace headroom
