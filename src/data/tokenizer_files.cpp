#include "data/tokenizer_parts.h"

#include <headroom/core/error.h>

#include "core/input_file.h"
#include "core/output_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace headroom {
namespace {

namespace fs = std::filesystem;

// Llama 3's tokenizer.json has 9 MB.
constexpr std::int64_t kMostTokenizerBytes = std::int64_t{256} << 20;

bool is_file(const fs::path& path) { return is_regular_file(path.string()); }

// Lines without their ends, of files by any system.
std::vector<std::string> lines_of(const std::string& path) {
  std::istringstream stream(read_tokenizer_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(std::move(line));
  }
  return lines;
}

// vocab.json and merges.txt: what GPT-2 and its followers had before tokenizer.json.
TokenizerParts read_vocabulary_and_merges(const fs::path& folder, const TokenizerConfig& config) {
  if (config.tokenizer_class.rfind("CLIP", 0) == 0)
    throw DataError(
        fmt::format("{}: a {} is not known here", folder.string(), config.tokenizer_class));
  const std::string merges_path = (folder / "merges.txt").string();
  BytePairs pairs;
  pairs.vocabulary = read_vocabulary_json((folder / "vocab.json").string());
  for (const std::string& line : lines_of(merges_path)) {
    if (line.empty() || line.rfind("#version", 0) == 0) continue;
    const std::size_t space = line.find(' ');
    if (space == std::string::npos)
      throw DataError(fmt::format("{}: '{}' is no pair of pieces", merges_path, line));
    pairs.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  TokenizerParts parts;
  parts.added = config.added;
  const auto end = pairs.vocabulary.find("<|endoftext|>");
  if (parts.added.empty() && end != pairs.vocabulary.end()) {
    AddedToken token;
    token.content = end->first;
    token.id = end->second;
    parts.added.push_back(token);
  }
  const bool is_qwen = config.tokenizer_class.rfind("Qwen2", 0) == 0;
  if (is_qwen) parts.normalizers.push_back(make_normal_form(NormalForm::kNfc));
  if (config.adds_space_before) parts.splits.push_back(make_space_before());
  parts.splits.push_back(make_pattern_split(is_qwen ? first_word_of_qwen2 : first_word_of_gpt2));
  try {
    parts.model = make_byte_pairs(pairs);
  } catch (const DataError& error) {
    throw DataError(fmt::format("{}: {}", merges_path, error.what()));
  }
  set_pieces(parts, pairs.vocabulary,
             [](const std::string& piece) { return bytes_of_piece(piece).value_or(piece); });
  return parts;
}

// vocab.txt: BERT's pieces, each numbered by its line.
TokenizerParts read_word_list(const std::string& path, const TokenizerConfig& config) {
  WordPieces pieces;
  std::int32_t number = 0;
  for (const std::string& line : lines_of(path)) pieces.vocabulary[line] = number++;
  TokenizerParts parts;
  BertCleaning cleaning;
  cleaning.lower_case = config.lower_case;
  cleaning.strip_accents = config.strip_accents.value_or(config.lower_case);
  cleaning.separate_ideographs = config.separates_ideographs;
  parts.normalizers.push_back(make_bert_cleaning(cleaning));
  parts.splits.push_back(make_bert_split());
  for (const char* name : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    const auto found = pieces.vocabulary.find(name);
    if (found == pieces.vocabulary.end()) continue;
    AddedToken token;
    token.content = name;
    token.id = found->second;
    parts.added.push_back(token);
  }
  const auto cls = pieces.vocabulary.find("[CLS]"), sep = pieces.vocabulary.find("[SEP]");
  if (cls != pieces.vocabulary.end() && sep != pieces.vocabulary.end()) {
    parts.one_text = {cls->second, kFirstText, sep->second};
    parts.two_texts = {cls->second, kFirstText, sep->second, kSecondText, sep->second};
  }
  parts.join.puts_spaces_between = true;
  parts.join.cleans_up = true;
  set_pieces(parts, pieces.vocabulary, [](const std::string& piece) { return piece; });
  try {
    parts.model = make_word_pieces(std::move(pieces));
  } catch (const DataError& error) {
    throw DataError(fmt::format("{}: {}", path, error.what()));
  }
  return parts;
}

// Adds what the folder says besides, and remembers the files.
std::unique_ptr<Tokenizer> finish(TokenizerParts parts, const fs::path& folder,
                                  const TokenizerConfig& config,
                                  std::vector<std::pair<std::string, std::string>> files) {
  parts.special = find_special_tokens(config, parts);
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    if (is_file(folder / name)) files.emplace_back((folder / name).string(), name);
  }
  parts.files = std::move(files);
  return compose_tokenizer(std::move(parts));
}

std::unique_ptr<Tokenizer> open_json(const fs::path& path) {
  const fs::path folder = path.parent_path();
  const TokenizerConfig config = read_tokenizer_config(folder.string());
  return finish(read_tokenizer_json(path.string()), folder, config,
                {{path.string(), "tokenizer.json"}});
}

std::unique_ptr<Tokenizer> open_merges(const fs::path& folder) {
  const TokenizerConfig config = read_tokenizer_config(folder.string());
  return finish(read_vocabulary_and_merges(folder, config), folder, config,
                {{(folder / "vocab.json").string(), "vocab.json"},
                 {(folder / "merges.txt").string(), "merges.txt"}});
}

std::unique_ptr<Tokenizer> open_word_list(const fs::path& path) {
  const fs::path folder = path.parent_path();
  const TokenizerConfig config = read_tokenizer_config(folder.string());
  return finish(read_word_list(path.string(), config), folder, config,
                {{path.string(), "vocab.txt"}});
}

// How a folder's tokenizer is opened; nothing when it has none.
std::function<std::unique_ptr<Tokenizer>()> opener(const fs::path& folder) {
  if (is_file(folder / "tokenizer.json"))
    return [=] { return open_json(folder / "tokenizer.json"); };
  if (is_file(folder / "vocab.json") && is_file(folder / "merges.txt"))
    return [=] { return open_merges(folder); };
  if (is_file(folder / "vocab.txt")) return [=] { return open_word_list(folder / "vocab.txt"); };
  if (is_file(folder / "tokenizer.model"))
    return [=] { return open_sentencepiece((folder / "tokenizer.model").string()); };
  return nullptr;
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path) {
  if (is_folder(path)) {
    if (const auto open = opener(path)) return open();
    throw DataError(fmt::format(
        "{}: no tokenizer.json, vocab.json with merges.txt, vocab.txt or tokenizer.model there",
        path));
  }
  const std::string ending = fs::path(path).extension().string();
  if (ending == ".json") return open_json(path);
  if (ending == ".txt") return open_word_list(path);
  return open_sentencepiece(path);
}

bool has_tokenizer(const std::string& folder) { return opener(folder) != nullptr; }

std::string read_tokenizer_file(const std::string& path) {
  return InputFile(path).read_all(kMostTokenizerBytes);
}

void write_tokenizer_file(const std::string& folder, const std::string& name,
                          const std::string& content) {
  OutputFile file((fs::path(folder) / name).string(), throw_as<DataError>);
  file.write(content);
  file.commit();
}

void copy_tokenizer_file(const std::string& path, const std::string& folder,
                         const std::string& name) {
  const fs::path target = fs::path(folder) / name;
  std::error_code error;
  if (fs::equivalent(path, target, error)) return;
  write_tokenizer_file(folder, name, read_tokenizer_file(path));
}

void set_pieces(TokenizerParts& parts, const Vocabulary& vocabulary,
                const std::function<std::string(const std::string&)>& text_of) {
  std::int64_t last = -1;
  for (const auto& [piece, id] : vocabulary) last = std::max<std::int64_t>(last, id);
  for (const AddedToken& token : parts.added) {
    if (token.id < 0)
      throw DataError(
          fmt::format("the added token '{}' has the number {}", token.content, token.id));
    last = std::max(last, token.id);
  }
  const auto count = static_cast<std::int64_t>(vocabulary.size() + parts.added.size());
  constexpr std::int64_t kGap = 65536;
  if (last >= 2 * count + kGap)
    throw DataError(
        fmt::format("{} tokens with numbers up to {}: most numbers are missing", count, last));
  parts.pieces.assign(static_cast<std::size_t>(last + 1), {});
  for (const auto& [piece, id] : vocabulary)
    parts.pieces[static_cast<std::size_t>(id)] = text_of(piece);
  for (const AddedToken& token : parts.added)
    parts.pieces[static_cast<std::size_t>(token.id)] = token.content;
}

}  // namespace headroom
