#include "data/table_file.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/name_list.h"
#include "core/text.h"
#include "data/unicode.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <string_view>

namespace headroom {
namespace {

constexpr std::int64_t kMostTableBytes = std::int64_t{16} << 30;

[[noreturn]] void fail(const std::string& path, std::int64_t row, const std::string& what) {
  throw DataError(fmt::format("{}: row {}: {}", shown_path(path), row, what));
}

void check_utf8(const std::string& path, std::int64_t row, const std::string& column,
                std::string_view text) {
  const std::optional<std::size_t> wrong = first_byte_outside_utf8(text);
  if (!wrong) return;
  fail(path, row,
       fmt::format("column '{}' is not UTF-8 at its byte {} (0x{:02x}); convert the file", column,
                   *wrong, static_cast<unsigned char>(text[*wrong])));
}

// Fields of a row after the other.
class SeparatedReader {
 public:
  SeparatedReader(const std::string& path, std::string_view text, char separator)
      : path_(path), text_(text), separator_(separator) {}

  // False at the end.
  bool next(std::vector<std::string>& fields) {
    while (at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r')) {
      if (text_[at_] == '\n') ++row_;  // an empty line
      ++at_;
    }
    fields.clear();
    if (at_ >= text_.size()) return false;
    ++row_;
    while (true) {
      fields.push_back(field());
      if (at_ >= text_.size()) return true;
      const char end = text_[at_++];
      if (end == separator_) continue;
      if (end == '\r' && at_ < text_.size() && text_[at_] == '\n') ++at_;
      return true;
    }
  }
  std::int64_t row() const { return row_; }

 private:
  std::string field() {
    if (at_ < text_.size() && text_[at_] == '"') return quoted_field();
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != separator_ && text_[at_] != '\n' &&
           text_[at_] != '\r')
      ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string quoted_field() {
    std::string value;
    ++at_;
    while (true) {
      const std::size_t quote = text_.find('"', at_);
      if (quote == std::string_view::npos) fail(path_, row_, "a quote is opened and never closed");
      value += text_.substr(at_, quote - at_);
      at_ = quote + 1;
      if (at_ >= text_.size() || text_[at_] != '"') break;
      value += '"';
      ++at_;
    }
    if (at_ < text_.size() && text_[at_] != separator_ && text_[at_] != '\n' && text_[at_] != '\r')
      fail(path_, row_,
           "text follows a closing quote; a quote inside of a quoted field is written twice");
    return value;
  }

  const std::string& path_;
  std::string_view text_;
  char separator_;
  std::size_t at_ = 0;
  std::int64_t row_ = 0;
};

Table read_separated(const std::string& path, std::string_view text, char separator,
                     const std::vector<std::string>& names, const std::vector<std::string>& flags) {
  SeparatedReader reader(path, text, separator);
  std::vector<std::string> header, fields;
  if (!reader.next(header)) fail(path, 1, "the file is empty; the first row names the columns");
  for (const std::string& name : header) check_utf8(path, reader.row(), "(header)", name);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto found = std::find(header.begin(), header.end(), names[i]);
    if (found == header.end()) {
      fail(path, reader.row(),
           fmt::format("there is no column '{}' among {}; give --{}", names[i], name_list(header),
                       flags[i]));
    }
    places.push_back(static_cast<std::size_t>(found - header.begin()));
  }
  Table table{path, std::vector<std::vector<std::string>>(names.size()), {}};
  while (reader.next(fields)) {
    if (fields.size() != header.size()) {
      fail(path, reader.row(),
           fmt::format("{} fields, but the header names {}; a field with the separator in it needs "
                       "quotes",
                       fields.size(), header.size()));
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
      check_utf8(path, reader.row(), names[i], fields[places[i]]);
      table.columns[i].push_back(std::move(fields[places[i]]));
    }
    table.rows.push_back(reader.row());
  }
  return table;
}

std::string value_of(const nlohmann::json& object, const std::string& path, std::int64_t row,
                     const std::string& name, const std::string& flag) {
  const auto found = object.find(name);
  if (found == object.end()) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.push_back(key);
    fail(path, row,
         fmt::format("there is no key '{}' among {}; give --{}", name, name_list(keys), flag));
  }
  if (found->is_string()) return found->get<std::string>();
  if (found->is_number() || found->is_boolean()) return found->dump();
  fail(path, row,
       fmt::format("'{}' is {}, but expected a text or a number", name, found->type_name()));
}

Table read_json_lines(const std::string& path, std::string_view text,
                      const std::vector<std::string>& names,
                      const std::vector<std::string>& flags) {
  Table table{path, std::vector<std::vector<std::string>>(names.size()), {}};
  std::int64_t row = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++row;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    check_utf8(path, row, "(line)", line);
    if (!json_depth_is_allowed(line)) fail(path, row, "the JSON is nested too deeply");
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object()) fail(path, row, "the line is not a JSON object");
    for (std::size_t i = 0; i < names.size(); ++i)
      table.columns[i].push_back(value_of(object, path, row, names[i], flags[i]));
    table.rows.push_back(row);
  }
  return table;
}

}  // namespace

bool is_table_name(const std::string& name) {
  return ends_with(name, ".csv") || ends_with(name, ".tsv") || ends_with(name, ".jsonl");
}

std::string Table::place(std::int64_t index) const {
  return fmt::format("{}: row {}", shown_path(path), rows[static_cast<std::size_t>(index)]);
}

Table read_table(const std::string& path, const std::vector<std::string>& columns,
                 const std::vector<std::string>& flags) {
  const std::string bytes = InputFile(path).read_all(kMostTableBytes);
  std::string_view text = bytes;
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (starts_with(text, kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  Table table =
      ends_with(path, ".jsonl")
          ? read_json_lines(path, text, columns, flags)
          : read_separated(path, text, ends_with(path, ".tsv") ? '\t' : ',', columns, flags);
  if (table.rows.empty())
    throw DataError(fmt::format("{}: there is no row of data in it", shown_path(path)));
  return table;
}

}  // namespace headroom
