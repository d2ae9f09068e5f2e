#include "model/config_file.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <optional>

namespace headroom {
namespace {

constexpr const char* kNamesKey = "id2label";

}  // namespace

struct ConfigFile::Content {
  std::string path = "config.json";
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::optional<std::int64_t> asked_labels;

  nlohmann::ordered_json& at(const std::string& section) {
    return section.empty() ? json : json[section];
  }
  void set(const ConfigSetter& setter, const std::string& key,
           const nlohmann::ordered_json& value) const {
    try {
      setter(key, value.dump());
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("'{}': {}", path, error.what()));
    }
  }
  // Null where there is none.
  nlohmann::ordered_json get(const std::string& section, const std::string& key) const {
    const nlohmann::ordered_json& object = section.empty() ? json : json.at(section);
    const auto found = object.find(key);
    return found == object.end() ? nlohmann::ordered_json() : *found;
  }
  // Writes the member. Or gives it the value of an absent key, and returns what is there to be read
  // instead: null where there is nothing.
  template <typename Value>
  nlohmann::ordered_json exchange(const std::string& section, const std::string& key, Value& member,
                                  const Value& if_absent, bool is_read) {
    if (!is_read) {
      at(section)[key] = member;
      return {};
    }
    member = if_absent;
    return get(section, key);
  }
};

ConfigFile::ConfigFile() : content_(std::make_shared<Content>()) {}

ConfigFile ConfigFile::read(const std::string& path) {
  ConfigFile config;
  config.is_read_ = true;
  config.content_->path = path;
  config.content_->json =
      nlohmann::ordered_json::parse(read_json_text(path), nullptr, /*allow_exceptions=*/false);
  if (!config.content_->json.is_object())
    throw DataError(fmt::format("'{}' is not a JSON object", path));
  return config;
}

ConfigFile ConfigFile::of_text(const std::string& text) {
  ConfigFile config;
  config.content_->json = nlohmann::ordered_json::parse(text);
  return config;
}

ConfigFile ConfigFile::for_writing() const {
  ConfigFile copy = *this;
  copy.content_ = std::make_shared<Content>(*content_);
  copy.is_read_ = false;
  return copy;
}

bool ConfigFile::is_read() const { return is_read_; }

bool ConfigFile::has(const std::string& key) const {
  return !content_->get(section_, key).is_null();
}

std::string ConfigFile::text() const {
  return content_->json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

void ConfigFile::size(const std::string& key, std::int64_t& member, std::int64_t if_absent,
                      ConfigSetter (*setter)(std::int64_t&)) {
  const auto value = content_->exchange(section_, key, member, if_absent, is_read_);
  if (!value.is_null()) content_->set(setter(member), key, value);
}

void ConfigFile::number(const std::string& key, double& member, double if_absent) {
  const auto value = content_->exchange(section_, key, member, if_absent, is_read_);
  if (value.is_null()) return;
  if (!value.is_number() || !(value.get<double>() > 0))
    refuse(key, fmt::format("{} is not a number above 0", value.dump()));
  member = value.get<double>();
}

void ConfigFile::probability(const std::string& key, double& member, double if_absent) {
  const auto value = content_->exchange(section_, key, member, if_absent, is_read_);
  if (!value.is_null()) content_->set(set_probability(member), key, value);
}

void ConfigFile::flag(const std::string& key, bool& member, bool if_absent) {
  const auto value = content_->exchange(section_, key, member, if_absent, is_read_);
  if (value.is_null()) return;
  if (!value.is_boolean()) refuse(key, fmt::format("{} is neither true nor false", value.dump()));
  member = value.get<bool>();
}

void ConfigFile::word(const std::string& key, std::string& member, const std::string& if_absent) {
  const auto value = content_->exchange(section_, key, member, if_absent, is_read_);
  if (value.is_null()) return;
  if (!value.is_string()) refuse(key, fmt::format("{} is not a word", value.dump()));
  member = value.get<std::string>();
}

void ConfigFile::only(const std::string& key, bool value) {
  bool found = value;
  flag(key, found, value);
  if (found != value) refuse(key, fmt::format("only {} can be served here", value));
}

void ConfigFile::only(const std::string& key, double value) {
  double found = value;
  number(key, found, value);
  if (found != value)
    refuse(key, fmt::format("is {}, and only {} can be served here", found, value));
}

void ConfigFile::only(const std::string& key, const std::string& value) {
  std::string found = value;
  word(key, found, value);
  if (found != value) refuse_word(key, found, {value});
}

void ConfigFile::image_size(std::int64_t& rows, std::int64_t& columns, std::int64_t if_absent) {
  const char* key = "image_size";
  if (!is_read_) {
    nlohmann::ordered_json& value = content_->at(section_)[key];
    value = rows;
    if (rows != columns) value = nlohmann::ordered_json::array({rows, columns});
    return;
  }
  auto value = content_->get(section_, key);
  if (value.is_null()) value = if_absent;
  if (!value.is_array()) value = nlohmann::ordered_json::array({value, value});
  if (value.size() != 2) refuse(key, fmt::format("{} is not rows and columns", value.dump()));
  content_->set(set_side(rows), key, value[0]);
  content_->set(set_side(columns), key, value[1]);
}

void ConfigFile::num_labels(std::int64_t& member) {
  constexpr std::int64_t kIfAbsent = 2;
  if (is_read_ && content_->asked_labels) {
    member = *content_->asked_labels;
    return;
  }
  const std::vector<std::string> names = label_names();
  if (is_read_) {
    if (names.empty()) return size("num_labels", member, kIfAbsent);
    member = static_cast<std::int64_t>(names.size());
    return;
  }
  if (static_cast<std::int64_t>(names.size()) == member) return;
  std::vector<std::string> generic;
  for (std::int64_t i = 0; i < member; ++i) generic.push_back(fmt::format("LABEL_{}", i));
  set_label_names(generic);
}

std::vector<std::string> ConfigFile::label_names() const {
  const auto labels = content_->get(section_, kNamesKey);
  std::vector<std::string> names;
  if (labels.is_null()) return names;
  if (!labels.is_object() || labels.empty()) refuse(kNamesKey, "is not a list of names by number");
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const auto found = labels.find(std::to_string(i));
    if (found == labels.end() || !found->is_string())
      refuse(kNamesKey, fmt::format("has no name of the class {}", i));
    names.push_back(found->get<std::string>());
  }
  return names;
}

void ConfigFile::set_label_names(const std::vector<std::string>& names) {
  nlohmann::ordered_json by_number = nlohmann::ordered_json::object(), numbers = by_number;
  for (std::size_t i = 0; i < names.size(); ++i) {
    by_number[std::to_string(i)] = names[i];
    numbers[names[i]] = i;
  }
  content_->at(section_)[kNamesKey] = by_number;
  content_->at(section_)["label2id"] = numbers;
}

void ConfigFile::set_integer(const std::string& key, std::int64_t value) {
  content_->at(section_)[key] = value;
}

void ConfigFile::ask_for_labels(std::int64_t num_labels) { content_->asked_labels = num_labels; }

void ConfigFile::head(std::int64_t& num_labels, const std::string& language_model,
                      const std::string& classifier, const std::string& model_type) {
  if (!is_read_) {
    set_kind(num_labels > 0 ? classifier : language_model, model_type);
    if (num_labels > 0) this->num_labels(num_labels);
    return;
  }
  const auto architectures = content_->get("", "architectures");
  const bool is_classifier =
      architectures.is_array() && !architectures.empty() && architectures.front().is_string() &&
      ends_with(architectures.front().get<std::string>(), "ForSequenceClassification");
  if (is_classifier || content_->asked_labels) {
    this->num_labels(num_labels);
  } else {
    num_labels = 0;
  }
}

void ConfigFile::set_kind(const std::string& architecture, const std::string& model_type) {
  if (is_read_) return;
  nlohmann::ordered_json& json = content_->json;
  json["architectures"] = {architecture};
  json["model_type"] = model_type;
  json["torch_dtype"] = "float32";
  if (json.contains("dtype")) json["dtype"] = "float32";
  json.erase("_name_or_path");
}

ConfigFile ConfigFile::section(const std::string& key) const {
  ConfigFile part = *this;
  part.section_ = key;
  nlohmann::ordered_json& value = content_->json[key];
  if (value.is_null()) value = nlohmann::ordered_json::object();
  if (!value.is_object()) refuse(key, "is not an object");
  return part;
}

void ConfigFile::refuse(const std::string& key, const std::string& what) const {
  const std::string place = section_.empty() ? key : section_ + "." + key;
  throw ConfigError(fmt::format("'{}': {}: {}", content_->path, place, what));
}

void ConfigFile::refuse_word(const std::string& key, const std::string& found,
                             const std::vector<std::string>& known) const {
  refuse(key, fmt::format("'{}' cannot be served here; known: {}", found, fmt::join(known, ", ")));
}

}  // namespace headroom
