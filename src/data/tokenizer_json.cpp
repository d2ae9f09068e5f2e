#include "data/tokenizer_parts.h"

#include <headroom/core/error.h>

#include "core/input_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>

namespace headroom {
namespace {

using nlohmann::json;

constexpr const char* kSpaceMark = "\u2581";

std::string type_of(const json& part) { return part.at("type").get<std::string>(); }

[[noreturn]] void refuse(const char* what, const std::string& type, const char* known) {
  throw DataError(fmt::format("the {} '{}' is not known here: {} are", what, type, known));
}

// The parts of a Sequence, or the one part; nothing for null.
std::vector<json> parts_of(const json& part, const char* list) {
  if (part.is_null()) return {};
  if (type_of(part) != "Sequence") return {part};
  return part.at(list).get<std::vector<json>>();
}

bool flag(const json& part, const char* name, bool otherwise) {
  const auto found = part.find(name);
  return found == part.end() || found->is_null() ? otherwise : found->get<bool>();
}

std::string text(const json& part, const char* name) {
  const auto found = part.find(name);
  return found == part.end() || found->is_null() ? std::string() : found->get<std::string>();
}

Vocabulary vocabulary_of(const json& object) {
  if (!object.is_object()) throw DataError("the vocabulary is no object of pieces and numbers");
  Vocabulary vocabulary;
  vocabulary.reserve(object.size());
  for (const auto& [piece, id] : object.items()) {
    const auto number = id.get<std::int64_t>();
    if (!id.is_number_integer() || number < 0 || number > std::numeric_limits<std::int32_t>::max())
      throw DataError(fmt::format("the piece '{}' has the number {}", piece, id.dump()));
    vocabulary.emplace(piece, static_cast<std::int32_t>(number));
  }
  return vocabulary;
}

TextStep normalizer_of(const json& part) {
  const std::string type = type_of(part);
  if (type == "NFC") return make_normal_form(NormalForm::kNfc);
  if (type == "NFD") return make_normal_form(NormalForm::kNfd);
  if (type == "NFKC") return make_normal_form(NormalForm::kNfkc);
  if (type == "NFKD") return make_normal_form(NormalForm::kNfkd);
  if (type == "Lowercase") return to_lower_case;
  if (type == "StripAccents") return [](const std::string& x) { return without(x, is_mark); };
  if (type == "Prepend") {
    return [prefix = text(part, "prepend")](const std::string& x) {
      return x.empty() ? x : prefix + x;
    };
  }
  if (type == "Replace" && part.at("pattern").contains("String")) {
    return [from = text(part.at("pattern"), "String"), to = text(part, "content")](std::string x) {
      return replace_all(std::move(x), from, to);
    };
  }
  if (type == "BertNormalizer") {
    BertCleaning options;
    options.clean_text = flag(part, "clean_text", true);
    options.separate_ideographs = flag(part, "handle_chinese_chars", true);
    options.lower_case = flag(part, "lowercase", true);
    options.strip_accents = flag(part, "strip_accents", options.lower_case);
    return make_bert_cleaning(options);
  }
  refuse("normalizer", type,
         "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Prepend, Replace of a string, "
         "BertNormalizer, Sequence");
}

SplitStep pattern_split_of(const json& part) {
  const std::string behavior = text(part, "behavior");
  const bool inverted = flag(part, "invert", false);
  // The known patterns match all of a text, so that nothing is left to be removed.
  if (!(behavior == "Isolated" && !inverted) && !(behavior == "Removed" && inverted))
    throw DataError(fmt::format("a split with the behavior '{}'{} is not known here", behavior,
                                inverted ? ", inverted," : ""));
  if (!part.at("pattern").contains("Regex"))
    throw DataError("a split by a string is not known here: those by a regular expression are");
  return make_pattern_split(split_pattern(text(part.at("pattern"), "Regex")));
}

SplitStep metaspace_of(const json& part) {
  const std::string scheme = text(part, "prepend_scheme");
  if (scheme == "first")
    throw DataError(
        "Metaspace with the prepend_scheme 'first' is not known here: give its tokenizer.model");
  const bool goes_before =
      scheme.empty() ? flag(part, "add_prefix_space", true) : scheme == "always";
  return make_space_replacement(text(part, "replacement"), goes_before, flag(part, "split", true));
}

void add_splits(const json& pre_tokenizer, TokenizerParts& parts, bool& is_byte_level) {
  for (const json& part : parts_of(pre_tokenizer, "pretokenizers")) {
    const std::string type = type_of(part);
    if (type == "ByteLevel") {
      is_byte_level = true;
      if (flag(part, "add_prefix_space", true)) parts.splits.push_back(make_space_before());
      if (flag(part, "use_regex", true))
        parts.splits.push_back(make_pattern_split(first_word_of_gpt2));
    } else if (type == "Split") {
      parts.splits.push_back(pattern_split_of(part));
    } else if (type == "Digits") {
      parts.splits.push_back(make_digit_split(flag(part, "individual_digits", false)));
    } else if (type == "BertPreTokenizer") {
      parts.splits.push_back(make_bert_split());
    } else if (type == "WhitespaceSplit") {
      parts.splits.push_back(make_blank_split());
    } else if (type == "Metaspace") {
      parts.splits.push_back(metaspace_of(part));
    } else {
      refuse("pre-tokenizer", type,
             "ByteLevel, Split, Digits, BertPreTokenizer, WhitespaceSplit, Metaspace, Sequence");
    }
  }
}

// "a b", or ["a", "b"] as newer files have it.
std::pair<std::string, std::string> merge_of(const json& merge) {
  if (merge.is_array() && merge.size() == 2)
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  const auto line = merge.get<std::string>();
  const std::size_t space = line.find(' ');
  if (space == std::string::npos)
    throw DataError(fmt::format("the merge '{}' is no pair of pieces", line));
  return {line.substr(0, space), line.substr(space + 1)};
}

// Without this, a text without a pre-tokenizer is one word. A cut before the mark of a space
// changes nothing where no piece has one behind another character.
void cut_at_spaces(const Vocabulary& vocabulary, TokenizerParts& parts) {
  if (!parts.splits.empty() || vocabulary.count(kSpaceMark) == 0) return;
  const std::string mark = kSpaceMark;
  for (const auto& [piece, id] : vocabulary) {
    const std::size_t last = piece.rfind(mark);
    for (std::size_t i = 0; last != std::string::npos && i < last; i += mark.size()) {
      if (piece.compare(i, mark.size(), mark) != 0) return;
    }
  }
  parts.splits.push_back(make_cut_before(mark));
}

// Pieces as SentencePiece writes them: a mark for a space, <0x41> for a byte.
std::string text_of_marked_piece(const std::string& piece) {
  const auto digit = [&](std::size_t i) {
    return std::string_view("0123456789ABCDEF").find(piece[i]);
  };
  if (piece.size() == 6 && piece.rfind("<0x", 0) == 0 && piece[5] == '>' &&
      digit(3) != std::string_view::npos && digit(4) != std::string_view::npos)
    return std::string(1, static_cast<char>(digit(3) * 16 + digit(4)));
  return replace_all(piece, kSpaceMark, " ");
}

void set_byte_pairs(const json& model, bool is_byte_level, TokenizerParts& parts) {
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!text(model, name).empty())
      throw DataError(fmt::format("{} of BPE is not known here", name));
  }
  if (model.contains("dropout") && model["dropout"].is_number() && model["dropout"] != 0)
    throw DataError("BPE with dropout is not known here");
  BytePairs pairs;
  pairs.vocabulary = vocabulary_of(model.at("vocab"));
  for (const json& merge : model.at("merges")) pairs.merges.push_back(merge_of(merge));
  pairs.is_byte_level = is_byte_level;
  pairs.ignores_merges = flag(model, "ignore_merges", false);
  pairs.fuses_unknown = flag(model, "fuse_unk", false);
  pairs.falls_back_to_bytes = flag(model, "byte_fallback", false);
  if (!text(model, "unk_token").empty()) pairs.unknown = text(model, "unk_token");
  parts.model = make_byte_pairs(pairs);
  if (!is_byte_level) {
    cut_at_spaces(pairs.vocabulary, parts);
    parts.join.drops_first_space = true;
    return set_pieces(parts, pairs.vocabulary, text_of_marked_piece);
  }
  set_pieces(parts, pairs.vocabulary,
             [](const std::string& piece) { return bytes_of_piece(piece).value_or(piece); });
}

void set_word_pieces(const json& model, const json& decoder, TokenizerParts& parts) {
  WordPieces pieces;
  pieces.vocabulary = vocabulary_of(model.at("vocab"));
  if (model.contains("unk_token")) pieces.unknown = text(model, "unk_token");
  if (model.contains("continuing_subword_prefix"))
    pieces.continuation = text(model, "continuing_subword_prefix");
  pieces.most_characters = model.value("max_input_chars_per_word", pieces.most_characters);
  parts.join.puts_spaces_between = true;
  parts.join.continuation = pieces.continuation;
  parts.join.cleans_up = decoder.is_object() && flag(decoder, "cleanup", true);
  set_pieces(parts, pieces.vocabulary, [](const std::string& piece) { return piece; });
  parts.model = make_word_pieces(std::move(pieces));
}

void set_model(const json& root, bool is_byte_level, TokenizerParts& parts) {
  const json& model = root.at("model");
  // Files of the first version do not name the type.
  const std::string type = model.contains("type")     ? type_of(model)
                           : model.contains("merges") ? "BPE"
                                                      : "WordPiece";
  const json decoder = root.value("decoder", json());
  if (type == "BPE") return set_byte_pairs(model, is_byte_level, parts);
  if (type == "WordPiece") return set_word_pieces(model, decoder, parts);
  refuse("model", type, "BPE and WordPiece");
}

std::vector<AddedToken> added_tokens_of(const json& list) {
  std::vector<AddedToken> tokens;
  for (const json& item : list) {
    AddedToken token;
    token.content = item.at("content").get<std::string>();
    token.id = item.at("id").get<std::int64_t>();
    token.is_single_word = flag(item, "single_word", false);
    token.takes_blanks_before = flag(item, "lstrip", false);
    token.takes_blanks_after = flag(item, "rstrip", false);
    token.is_normalized = flag(item, "normalized", !flag(item, "special", false));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

std::vector<std::int64_t> template_of(const json& items, const json& special) {
  std::vector<std::int64_t> result;
  for (const json& item : items) {
    if (item.contains("Sequence")) {
      result.push_back(text(item["Sequence"], "id") == "B" ? kSecondText : kFirstText);
      continue;
    }
    for (const json& id : special.at(text(item.at("SpecialToken"), "id")).at("ids"))
      result.push_back(static_cast<std::int64_t>(id.get<std::uint32_t>()));
  }
  return result;
}

void set_templates(const json& processor, TokenizerParts& parts) {
  for (const json& part : parts_of(processor, "processors")) {
    const std::string type = type_of(part);
    if (type == "ByteLevel") continue;  // it changes offsets, not tokens
    if (type == "TemplateProcessing") {
      parts.one_text = template_of(part.at("single"), part.at("special_tokens"));
      parts.two_texts = template_of(part.at("pair"), part.at("special_tokens"));
    } else if (type == "BertProcessing" || type == "RobertaProcessing") {
      const auto cls = static_cast<std::int64_t>(part.at("cls").at(1).get<std::uint32_t>());
      const auto sep = static_cast<std::int64_t>(part.at("sep").at(1).get<std::uint32_t>());
      parts.one_text = {cls, kFirstText, sep};
      parts.two_texts = {cls, kFirstText, sep, kSecondText, sep};
      if (type == "RobertaProcessing") parts.two_texts.insert(parts.two_texts.begin() + 3, sep);
    } else {
      refuse("post-processor", type,
             "TemplateProcessing, ByteLevel, BertProcessing, RobertaProcessing, Sequence");
    }
  }
}

TokenizerParts parts_of_json(const json& root) {
  TokenizerParts parts;
  bool is_byte_level = false;
  parts.added = added_tokens_of(root.value("added_tokens", json::array()));
  for (const json& part : parts_of(root.value("normalizer", json()), "normalizers"))
    parts.normalizers.push_back(normalizer_of(part));
  add_splits(root.value("pre_tokenizer", json()), parts, is_byte_level);
  set_model(root, is_byte_level, parts);
  set_templates(root.value("post_processor", json()), parts);
  const auto vocabulary = static_cast<std::int64_t>(parts.pieces.size());
  for (const auto& tokens : {parts.one_text, parts.two_texts}) {
    for (const std::int64_t token : tokens) {
      if (token >= vocabulary)
        throw DataError(fmt::format("the post-processor adds token {} of {}", token, vocabulary));
    }
  }
  return parts;
}

template <class Read>
auto with_json(const std::string& content, const std::string& name, const Read& read) {
  try {
    if (!json_depth_is_allowed(content)) throw DataError("the JSON is nested too deeply");
    return read(json::parse(content));
  } catch (const json::exception& error) {
    throw DataError(fmt::format("{}: no tokenizer: {}", name, error.what()));
  } catch (const DataError& error) {
    throw DataError(fmt::format("{}: {}", name, error.what()));
  }
}

}  // namespace

TokenizerParts parse_tokenizer_json(const std::string& content, const std::string& name) {
  return with_json(content, name, parts_of_json);
}

TokenizerParts read_tokenizer_json(const std::string& path) {
  return parse_tokenizer_json(read_tokenizer_file(path), path);
}

Vocabulary read_vocabulary_json(const std::string& path) {
  return with_json(read_tokenizer_file(path), path, vocabulary_of);
}

}  // namespace headroom
