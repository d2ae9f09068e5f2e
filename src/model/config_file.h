#pragma once

// config.json of a model's folder, read into the config struct of a family and written from it by
// the same lines.

#include "model/config_text.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// A JSON object that is being read or being written. Each of size(), number(), ... does one or the
/// other for one key: reading gives the member the value of the file, or `if_absent` (what Hugging
/// Face takes when the key is missing or null); writing sets the key. Throws ConfigError, naming
/// the file and the key, on a value that cannot be served.
class ConfigFile {
 public:
  /// An empty one, to be written.
  ConfigFile();
  /// Throws DataError when the file is missing or is no JSON object.
  static ConfigFile read(const std::string& path);
  /// What text() gave, to be written over.
  static ConfigFile of_text(const std::string& text);
  /// The same content to be written over, so that keys of others are kept.
  ConfigFile for_writing() const;

  bool is_read() const;
  bool has(const std::string& key) const;  ///< and it is not null
  std::string text() const;                ///< of the whole file

  /// The setter (set_size, set_layers, set_side) says which numbers are allowed.
  void size(const std::string& key, std::int64_t& member, std::int64_t if_absent,
            ConfigSetter (*setter)(std::int64_t&) = set_size);
  /// A number from 0 to below 1.
  void probability(const std::string& key, double& member, double if_absent);
  /// A number above 0.
  void number(const std::string& key, double& member, double if_absent);
  void flag(const std::string& key, bool& member, bool if_absent);
  void word(const std::string& key, std::string& member, const std::string& if_absent);
  /// One of several words that each stand for a value; writing takes the first word of the value.
  template <class Value>
  void choice(const std::string& key, Value& member,
              const std::vector<std::pair<std::string, Value>>& words,
              const std::string& if_absent);
  /// Values that this program has no other of: a file that has another is refused.
  void only(const std::string& key, bool value);
  void only(const std::string& key, double value);
  void only(const std::string& key, const std::string& value);

  /// "image_size": one number, or rows and columns.
  void image_size(std::int64_t& rows, std::int64_t& columns, std::int64_t if_absent);
  /// The number of classes, by "id2label".
  void num_labels(std::int64_t& member);
  /// What the folder holds: "architectures" and "model_type". Writing alone.
  void set_kind(const std::string& architecture, const std::string& model_type);
  /// What a model of text ends in: with `num_labels` classes a classifier, with 0 its language
  /// model. Reading goes by ask_for_labels(), or else by "architectures"; writing is set_kind().
  void head(std::int64_t& num_labels, const std::string& language_model,
            const std::string& classifier, const std::string& model_type);

  /// Classes that a model is to have, whatever the file says; 0: a language model.
  void ask_for_labels(std::int64_t num_labels);
  /// The names of the classes by number; empty where the file has none. Throws ConfigError when
  /// "id2label" is malformed.
  std::vector<std::string> label_names() const;
  void set_label_names(const std::vector<std::string>& names);
  void set_integer(const std::string& key, std::int64_t value);

  /// The object under a key, where the same calls go.
  ConfigFile section(const std::string& key) const;

 private:
  struct Content;
  [[noreturn]] void refuse(const std::string& key, const std::string& what) const;
  void refuse_word(const std::string& key, const std::string& found,
                   const std::vector<std::string>& known) const;

  std::shared_ptr<Content> content_;
  std::string section_;
  bool is_read_ = false;
};

template <class Value>
void ConfigFile::choice(const std::string& key, Value& member,
                        const std::vector<std::pair<std::string, Value>>& words,
                        const std::string& if_absent) {
  std::string text;
  std::vector<std::string> known;
  for (const auto& [word, value] : words) {
    if (!is_read() && text.empty() && value == member) text = word;
    known.push_back(word);
  }
  word(key, text, if_absent);
  for (const auto& [word, value] : words) {
    if (word == text) {
      member = value;
      return;
    }
  }
  refuse_word(key, text, known);
}

}  // namespace headroom
