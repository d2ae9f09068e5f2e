#include "model/safetensors_header.h"

#include <headroom/core/error.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <set>

namespace headroom {
namespace {

struct DtypeRow {
  const char* name;
  at::ScalarType type;
};
constexpr std::array<DtypeRow, 10> kDtypes = {{{"F64", at::kDouble},
                                               {"F32", at::kFloat},
                                               {"F16", at::kHalf},
                                               {"BF16", at::kBFloat16},
                                               {"I64", at::kLong},
                                               {"I32", at::kInt},
                                               {"I16", at::kShort},
                                               {"I8", at::kChar},
                                               {"U8", at::kByte},
                                               {"BOOL", at::kBool}}};
constexpr std::size_t kMostDimensions = 64;  // that LibTorch's loops can walk

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw DataError(fmt::format("'{}' is no safetensors file: {}", path, what));
}

/// Takes the JSON of a header as it is read. Nothing else than the format's own form is accepted,
/// so that neither depth nor repetition of the text costs memory.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<SafetensorsEntry> take() { return std::move(entries_); }

  bool null() override { fail("null"); }
  bool boolean(bool /*value*/) override { fail("true or false"); }
  bool number_integer(number_integer_t /*value*/) override { fail("a negative number"); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    fail("a number that is not whole");
  }
  bool binary(binary_t& /*value*/) override { fail("binary data"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kNumbers) fail("a number");
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) {
      refuse(path_, fmt::format("'{}' has the number {}, which no size can be",
                                entries_.back().name, value));
    }
    numbers_.push_back(static_cast<std::int64_t>(value));
    if (numbers_.size() > kMostDimensions) {
      refuse(path_, fmt::format("'{}' has more than {} dimensions", entries_.back().name,
                                kMostDimensions));
    }
    return true;
  }
  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || key_ != "dtype") fail(fmt::format("the text '{}'", value));
    const auto row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const DtypeRow& one) { return value == one.name; });
    if (row == kDtypes.end()) {
      refuse(path_, fmt::format("'{}' is of dtype '{}', which is none that can be read here",
                                entries_.back().name, value));
    }
    entries_.back().dtype = row->type;
    return true;
  }
  bool start_object(std::size_t /*count*/) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop && key_ == "__metadata__") {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTop) {
      place_ = Place::kTensor;
      entries_.emplace_back();
      entries_.back().name = key_;
    } else {
      fail("an object");
    }
    key_.clear();
    keys_.clear();
    return true;
  }
  bool key(string_t& value) override {
    auto& known = place_ == Place::kTop ? names_ : keys_;
    if (!known.insert(value).second)
      refuse(path_, fmt::format("its header has '{}' twice in one place", value));
    key_ = value;
    return true;
  }
  bool end_object() override {
    if (place_ == Place::kTensor &&
        keys_ != std::set<std::string>{"data_offsets", "dtype", "shape"})
      refuse(path_, fmt::format("'{}' must have dtype, shape and data_offsets, and nothing else",
                                entries_.back().name));
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return true;
  }
  bool start_array(std::size_t /*count*/) override {
    if (place_ != Place::kTensor || (key_ != "shape" && key_ != "data_offsets")) fail("a list");
    place_ = Place::kNumbers;
    numbers_.clear();
    return true;
  }
  bool end_array() override {
    SafetensorsEntry& entry = entries_.back();
    place_ = Place::kTensor;
    if (key_ == "shape") {
      entry.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2 || numbers_[0] > numbers_[1]) {
      refuse(path_, fmt::format("the data_offsets of '{}' are not a begin and an end", entry.name));
    }
    entry.begin = numbers_[0];
    entry.num_bytes = numbers_[1] - numbers_[0];
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    refuse(path_, fmt::format("its header is not JSON from byte {} on", position));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kNumbers, kEnd };

  [[noreturn]] void fail(const std::string& found) const {
    refuse(path_, fmt::format("its header has {} where none belongs{}", found,
                              key_.empty() ? "" : fmt::format(" ('{}')", key_)));
  }

  const std::string& path_;
  Place place_ = Place::kStart;
  std::string key_;
  std::set<std::string> names_, keys_;  // seen so far, of the whole header and of one object
  std::vector<std::int64_t> numbers_;
  std::vector<SafetensorsEntry> entries_;
};

/// Bytes of a tensor; the product counts no dimension as 0, so that strides do not overflow either.
std::int64_t checked_bytes(const std::string& path, const SafetensorsEntry& entry) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  bool is_empty = false;
  for (const std::int64_t size : entry.shape) {
    is_empty = is_empty || size == 0;
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) {
      refuse(path, fmt::format("the shape of '{}' is more than 2^63 bytes", entry.name));
    }
  }
  return is_empty ? 0 : bytes;
}

}  // namespace

std::vector<SafetensorsEntry> parse_safetensors_header(const std::string& path,
                                                       const std::string& json,
                                                       std::int64_t num_data_bytes) {
  if (json.empty() || json.front() != '{') refuse(path, "its header does not start with '{'");
  HeaderReader reader(path);
  nlohmann::json::sax_parse(json, &reader);
  std::vector<SafetensorsEntry> entries = reader.take();
  for (const SafetensorsEntry& entry : entries) {
    const std::int64_t bytes = checked_bytes(path, entry);
    if (bytes != entry.num_bytes) {
      refuse(path, fmt::format("'{}' has {} bytes, but its shape and dtype need {}", entry.name,
                               entry.num_bytes, bytes));
    }
  }
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.num_bytes) < std::pair(b.begin, b.num_bytes);
  });
  std::int64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != end) {
      refuse(path, fmt::format("'{}' starts at byte {}, where the tensor before it ends at {}: {}",
                               entry.name, entry.begin, end,
                               entry.begin < end ? "they overlap" : "there is a hole"));
    }
    end += entry.num_bytes;  // at most data_offsets[1], which is a number that was read
  }
  if (end != num_data_bytes) {
    refuse(path, fmt::format("its tensors are {} bytes, but {} are there after the header", end,
                             num_data_bytes));
  }
  return entries;
}

std::string make_safetensors_header(const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  std::set<std::string> names = {"__metadata__"};
  std::int64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second)
      throw ConfigError(fmt::format("two tensors to be saved are named '{}'", name));
    const auto row = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeRow& one) {
      return tensor.scalar_type() == one.type;
    });
    if (row == kDtypes.end()) {
      throw ConfigError(fmt::format("'{}' is {}, for which safetensors has no name", name,
                                    c10::toString(tensor.scalar_type())));
    }
    const std::int64_t end = at + static_cast<std::int64_t>(tensor.nbytes());
    json[name] = {
        {"dtype", row->name}, {"shape", tensor.sizes().vec()}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = json.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  if (static_cast<std::int64_t>(text.size()) > kMostSafetensorsHeaderBytes)
    throw ConfigError("the names of the tensors to be saved are more than 100 MB");
  std::string header;
  for (int byte = 0; byte < kSafetensorsLengthBytes; ++byte)
    header += static_cast<char>((text.size() >> (8 * byte)) & 0xff);
  return header + text;
}

std::map<std::string, std::string> parse_safetensors_index(const std::string& path,
                                                           const std::string& json) {
  const auto fail = [&](const std::string& what) {
    throw DataError(fmt::format("'{}' is no index of safetensors files: {}", path, what));
  };
  const auto parsed = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() || !parsed.contains("weight_map") || !parsed["weight_map"].is_object())
    fail("it has no \"weight_map\" of tensors to files");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : parsed["weight_map"].items()) {
    if (!file.is_string()) fail(fmt::format("the file of '{}' is not a name", name));
    files[name] = file.get<std::string>();
    // A model is its folder: an index must not make us open files elsewhere.
    if (files[name].empty() || files[name].find('/') != std::string::npos)
      fail(fmt::format("the file '{}' of '{}' is not in its folder", files[name], name));
  }
  return files;
}

}  // namespace headroom
