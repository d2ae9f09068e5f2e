// Texts in .csv, .tsv and .jsonl files.
#include <headroom/core/error.h>
#include "core/input_file.h"
#include "data/data_folder.h"
#include "data/data_format.h"
#include "data/pair_dataset.h"
#include "data/subset.h"
#include "data/table_file.h"
#include "data/text_data.h"
#include "data/text_samples.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

namespace headroom {
namespace {

namespace fs = std::filesystem;

// A file, or a folder with train.csv and perhaps val.csv, or one of the other endings.
DataParts files_of(const std::string& dataset) {
  if (is_regular_file(dataset) && is_table_name(dataset)) return {dataset, ""};
  if (!is_folder(dataset)) return {};
  for (const char* ending : {".csv", ".tsv", ".jsonl"}) {
    if (const DataParts parts = parts_of(dataset, ending); !parts.train.empty()) return parts;
  }
  return {};
}

std::int64_t padding_of(const Tokenizer& tokenizer) {
  const SpecialTokens special = tokenizer.special_tokens();
  return special.padding ? *special.padding : special.end.value_or(0);
}

// Calls add(part of the data, its table) for training and, where there is such a file, evaluation.
template <typename Make>
void make_parts(OpenedData& data, const DataRequest& request, const Make& make) {
  const DataParts files = files_of(request.dataset);
  if (files.eval.empty()) {
    std::tie(data.train, data.eval) = hold_out_a_tenth(make(files.train), request.order_seed);
  } else {
    data.train = make(files.train);
    data.eval = make(files.eval);
  }
}

// As many tokens of a text as the model reads, with those that belong around them.
std::vector<std::int64_t> encode_whole(const Tokenizer& tokenizer, const std::string& text,
                                       std::int64_t most) {
  std::vector<std::int64_t> tokens = tokenizer.encode(text);
  const auto num_around = static_cast<std::int64_t>(tokenizer.with_special_tokens({}).size());
  const std::int64_t room = std::max<std::int64_t>(0, most - num_around);
  tokens.resize(static_cast<std::size_t>(std::min(room, static_cast<std::int64_t>(tokens.size()))));
  return tokenizer.with_special_tokens(tokens);
}

OpenedData open_labelled(const DataRequest& request) {
  const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(request);
  mask_token_beside(*tokenizer, request);  // checks the vocabulary
  const DataParts files = files_of(request.dataset);
  const auto read = [&](const std::string& path) {
    return read_table(path, {request.text_column, request.label_column},
                      {"text_column", "label_column"});
  };
  const auto refuse = [](const Table& table, const std::string& label, const char* whose) {
    const auto found = std::find(table.columns[1].begin(), table.columns[1].end(), label);
    throw DataError(fmt::format("{}: the label '{}' is none of {}",
                                table.place(found - table.columns[1].begin()), label, whose));
  };
  Table train = read(files.train);
  const LabelMap labels =
      map_labels(train.columns[1], request.labels, !request.is_trained,
                 [&](const std::string& label) { refuse(train, label, "the model's"); });
  OpenedData data;
  data.tokenizer = tokenizer;
  data.labels = labels.names();
  data.padding_token = padding_of(*tokenizer);
  make_parts(data, request, [&](const std::string& path) -> std::shared_ptr<const Dataset> {
    const Table table = path == files.train ? std::move(train) : read(path);
    TokenLists texts;
    std::vector<std::int64_t> classes;
    for (std::int64_t i = 0; i < table.size(); ++i) {
      const std::string& label = table.columns[1][static_cast<std::size_t>(i)];
      if (label.empty()) throw DataError(fmt::format("{}: the label is empty", table.place(i)));
      if (!labels.has(label)) refuse(table, label, "those of the training data");
      classes.push_back(labels.number(label));
      const std::vector<std::int64_t> tokens = encode_whole(
          *tokenizer, table.columns[0][static_cast<std::size_t>(i)], request.input.length);
      if (tokens.empty()) throw DataError(fmt::format("{}: the text is empty", table.place(i)));
      texts.add(tokens);
    }
    return make_labelled_texts(std::move(texts), std::move(classes), *data.padding_token,
                               request.input.sees_all_tokens);
  });
  return data;
}

// The tokens of each text, and the end of a text where the tokenizer has one.
std::vector<std::vector<std::int64_t>> encode_texts(const Tokenizer& tokenizer,
                                                    const std::vector<std::string>& texts) {
  std::vector<std::vector<std::int64_t>> lists;
  const std::optional<std::int64_t> end = tokenizer.special_tokens().end;
  for (const std::string& text : texts) {
    lists.push_back(tokenizer.encode(text));
    if (end) lists.back().push_back(*end);
  }
  return lists;
}

// Texts as samples of a model that guesses each next token. A long one becomes several samples, of
// which each begins with the last token of the one before, so that every token is guessed once.
OpenedData open_documents(const DataRequest& request,
                          const std::shared_ptr<const Tokenizer>& tokenizer) {
  OpenedData data;
  data.tokenizer = tokenizer;
  make_parts(data, request, [&](const std::string& path) -> std::shared_ptr<const Dataset> {
    const Table table = read_table(path, {request.text_column}, {"text_column"});
    const std::int64_t length = request.input.length;
    TokenLists pieces;
    for (const std::vector<std::int64_t>& tokens : encode_texts(*tokenizer, table.columns[0])) {
      const auto count = static_cast<std::int64_t>(tokens.size());
      for (std::int64_t begin = 0; begin + 1 < count; begin += length)
        pieces.add(tokens.begin() + begin, tokens.begin() + std::min(begin + length + 1, count));
    }
    if (pieces.size() == 0)
      throw DataError(fmt::format(
          "{}: no text has two tokens, of which the second could be guessed", shown_path(path)));
    const std::int64_t padding = padding_of(*tokenizer);
    if (request.packs) return make_packed_documents(std::move(pieces), length, padding);
    return make_documents(std::move(pieces), padding);
  });
  return data;
}

// A model that guesses masked tokens reads crops of one text after the other.
OpenedData open_masked(const DataRequest& request,
                       const std::shared_ptr<const Tokenizer>& tokenizer, std::int64_t mask_token) {
  const std::string path = files_of(request.dataset).train;
  const Table table = read_table(path, {request.text_column}, {"text_column"});
  const std::optional<std::int64_t> separator = tokenizer->special_tokens().separator;
  std::vector<std::int32_t> all;
  for (const std::vector<std::int64_t>& tokens : encode_texts(*tokenizer, table.columns[0])) {
    all.insert(all.end(), tokens.begin(), tokens.end());
    if (separator) all.push_back(static_cast<std::int32_t>(*separator));
  }
  OpenedData data = crops_of(make_token_list(path, std::move(all)), request, mask_token);
  data.tokenizer = tokenizer;
  return data;
}

ImageTexts read_pairs(const std::string& path, const DataRequest& request) {
  Table table = read_table(path, {request.image_column, request.text_column},
                           {"image_column", "text_column"});
  ImageTexts pairs;
  for (std::int64_t i = 0; i < table.size(); ++i) {
    // Paths are seen from the file's own folder; an absolute one stays as it is.
    const std::string image =
        (fs::path(path).parent_path() / table.columns[0][static_cast<std::size_t>(i)]).string();
    if (!is_regular_file(image))
      throw DataError(fmt::format("{}: there is no image '{}'", table.place(i), shown_path(image)));
    pairs.images.push_back(image);
    pairs.places.push_back(table.place(i));
  }
  pairs.texts = std::move(table.columns[1]);
  return pairs;
}

OpenedData open_table(const DataRequest& request) {
  switch (request.input.kind) {
    case ModelInput::Kind::kTexts:
      return open_labelled(request);
    case ModelInput::Kind::kPairs: {
      const DataParts files = files_of(request.dataset);
      return open_pairs(request, read_pairs(files.train, request),
                        files.eval.empty() ? ImageTexts{} : read_pairs(files.eval, request));
    }
    default:
      break;
  }
  const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(request);
  const std::int64_t mask_token = mask_token_beside(*tokenizer, request);
  return request.input.num_masked > 0 ? open_masked(request, tokenizer, mask_token)
                                      : open_documents(request, tokenizer);
}

}  // namespace

DataFormat table_format() {
  using Kind = ModelInput::Kind;
  return {"a .csv, .tsv or .jsonl file, or a folder with train and val of them",
          "holds rows of text",
          {Kind::kTexts, Kind::kTokens, Kind::kPairs},
          true,
          [](const std::string& dataset) { return !files_of(dataset).train.empty(); },
          open_table};
}

}  // namespace headroom
