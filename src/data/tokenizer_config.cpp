#include "data/tokenizer_parts.h"

#include <headroom/core/error.h>

#include "core/input_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <initializer_list>

namespace headroom {
namespace {

using nlohmann::json;

// "eos_token": "</s>", or {"content": "</s>", ...}.
std::string name_of(const json& token) {
  if (token.is_string()) return token.get<std::string>();
  return token.is_object() ? token.value("content", std::string()) : std::string();
}

TokenizerConfig config_of(const json& root) {
  TokenizerConfig config;
  if (root.contains("tokenizer_class")) config.tokenizer_class = name_of(root["tokenizer_class"]);
  const auto set = [&](const char* name, auto& value) {
    if (root.contains(name) && root[name].is_boolean()) value = root[name].get<bool>();
  };
  set("add_prefix_space", config.adds_space_before);
  set("do_lower_case", config.lower_case);
  set("strip_accents", config.strip_accents);
  set("tokenize_chinese_chars", config.separates_ideographs);
  for (const auto& [key, value] : root.items()) {
    if (key.size() > 6 && key.compare(key.size() - 6, 6, "_token") == 0)
      config.names[key] = name_of(value);
  }
  const json added = root.value("added_tokens_decoder", json::object());
  for (const auto& [id, item] : added.items()) {
    AddedToken token;
    token.content = item.at("content").get<std::string>();
    const bool is_number =
        !id.empty() && id.size() < 10 && id.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number) throw DataError(fmt::format("the added token number '{}'", id));
    token.id = std::stoll(id);
    token.is_single_word = item.value("single_word", false);
    token.takes_blanks_before = item.value("lstrip", false);
    token.takes_blanks_after = item.value("rstrip", false);
    token.is_normalized = item.value("normalized", false);
    config.added.push_back(std::move(token));
  }
  return config;
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "tokenizer_config.json").string();
  if (!path_exists(path)) return {};
  try {
    return config_of(json::parse(read_json_text(path)));
  } catch (const json::exception& error) {
    throw DataError(fmt::format("{}: {}", path, error.what()));
  }
}

SpecialTokens find_special_tokens(const TokenizerConfig& config, const TokenizerParts& parts) {
  const auto number_of = [&](const std::string& piece) -> std::optional<std::int64_t> {
    const auto found = std::find(parts.pieces.begin(), parts.pieces.end(), piece);
    if (piece.empty() || found == parts.pieces.end()) return std::nullopt;
    return found - parts.pieces.begin();
  };
  const auto find = [&](const char* key, std::initializer_list<const char*> usual) {
    const auto named = config.names.find(key);
    if (named != config.names.end()) return number_of(named->second);
    for (const char* name : usual) {
      if (const auto number = number_of(name)) return number;
    }
    return std::optional<std::int64_t>();
  };
  SpecialTokens special;
  special.begin = find("bos_token", {"<s>", "<|begin_of_text|>", "<|endoftext|>"});
  special.end = find("eos_token", {"</s>", "<|end_of_text|>", "<|endoftext|>"});
  special.unknown = find("unk_token", {"[UNK]", "<unk>"});
  special.padding = find("pad_token", {"[PAD]", "<pad>"});
  special.mask = find("mask_token", {"[MASK]", "<mask>"});
  special.separator = find("sep_token", {"[SEP]"});
  special.summary = find("cls_token", {"[CLS]"});
  return special;
}

}  // namespace headroom
