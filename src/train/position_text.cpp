#include "train/position_text.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

namespace headroom {
namespace {

constexpr std::int64_t kMostCount = std::int64_t{1} << 62;
constexpr std::int64_t kMostRanks = 1 << 20;

bool is_plain(char c) {
  const auto code = static_cast<unsigned char>(c);
  return code > 0x20 && code != 0x7f && c != '%';
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text)
    result +=
        is_plain(c) ? std::string(1, c) : fmt::format("%{:02x}", static_cast<unsigned char>(c));
  return result;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

std::string to_hex(std::string_view bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto code = static_cast<unsigned char>(c);
    text += kDigits[code >> 4];
    text += kDigits[code & 15];
  }
  return text;
}

// The lines of a position by name; whatever is wrong is a SnapshotError.
class Fields {
 public:
  Fields(std::string_view text, std::string where) : where_(std::move(where)) {
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      if (end == std::string_view::npos) fail("is cut in its last line");
      const std::string_view line = text.substr(0, end);
      const std::size_t blank = line.find(' ');
      if (blank == std::string_view::npos) fail("has a line without a value");
      values_.emplace(line.substr(0, blank), line.substr(blank + 1));
      text.remove_prefix(end + 1);
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw SnapshotError(fmt::format("{} {}", where_, what));
  }

  std::string_view one(const std::string& name) const {
    const auto [first, end] = values_.equal_range(name);
    if (first == end) fail(fmt::format("lacks '{}'", name));
    if (std::next(first) != end) fail(fmt::format("has '{}' more than once", name));
    return first->second;
  }

  std::int64_t integer(const std::string& name, std::int64_t most = kMostCount) const {
    return parse_integer(one(name), name, most);
  }

  std::int64_t parse_integer(std::string_view text, const std::string& name,
                             std::int64_t most) const {
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || stop != text.data() + text.size() || value < 0 || value > most)
      fail(fmt::format("has no whole number from 0 to {} in '{}'", most, name));
    return value;
  }

  double number(const std::string& name) const { return parse_number(one(name), name); }

  double parse_number(std::string_view value_text, const std::string& name) const {
    const std::string text(value_text);
    char* stop = nullptr;
    const double value = std::strtod(text.c_str(), &stop);
    if (text.empty() || stop != text.c_str() + text.size())
      fail(fmt::format("has no number in '{}'", name));
    return value;
  }

  // Calls `read(first word, second word)` of every value of this name.
  template <typename Read>
  void each_pair(const std::string& name, const Read& read) const {
    const auto [first, end] = values_.equal_range(name);
    for (auto entry = first; entry != end; ++entry) {
      const std::size_t blank = entry->second.find(' ');
      if (blank == std::string_view::npos) fail(fmt::format("has half a line in '{}'", name));
      read(unescaped(entry->second.substr(0, blank)), entry->second.substr(blank + 1));
    }
  }

  std::string unescaped(std::string_view text) const {
    std::string result;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '%') {
        result += text[i];
        continue;
      }
      result += byte(text.substr(i + 1, 2));
      i += 2;
    }
    return result;
  }

  std::string bytes(std::string_view hex) const {
    std::string result;
    for (std::size_t i = 0; i < hex.size(); i += 2) result += byte(hex.substr(i, 2));
    return result;
  }

 private:
  char byte(std::string_view hex) const {
    const int high = hex.size() == 2 ? hex_digit(hex[0]) : -1;
    const int low = hex.size() == 2 ? hex_digit(hex[1]) : -1;
    if (high < 0 || low < 0)
      fail(fmt::format("has '{}' where two hexadecimal digits must be", hex));
    return static_cast<char>(high << 4 | low);
  }

  std::string where_;
  std::multimap<std::string, std::string_view, std::less<>> values_;
};

}  // namespace

std::string position_text(const TrainingPosition& position) {
  // Numbers in hexadecimal are exact.
  std::string text = fmt::format(
      "global_step {}\nmicro_batch {}\nloss_sum {:a}\nnum_skipped_updates {}\nloss_scale {:a}\n"
      "loss_scale_growth_tracker {}\nloss_scale_num_skipped {}\nnum_ranks {}\n",
      position.global_step, position.micro_batch, position.loss_sum, position.num_skipped_updates,
      position.scaler.scale, position.scaler.growth_tracker, position.scaler.num_skipped,
      position.random_states.size());
  if (position.best)
    text += fmt::format("best {} {:a}\nevaluations_since_best {}\n", position.best->update,
                        position.best->metric, position.num_evaluations_since_best);
  for (const auto& [shape, size] : position.micro_batch_by_shape)
    text += fmt::format("micro_batch_of_shape {} {}\n", escaped(shape), size);
  for (std::size_t rank = 0; rank < position.random_states.size(); ++rank)
    text += fmt::format("random_state {} {}\n", rank, to_hex(position.random_states[rank]));
  for (const auto& [key, value] : position.settings)
    text += fmt::format("setting {} {}\n", escaped(key), escaped(value));
  return text;
}

TrainingPosition parse_position(std::string_view text, const std::string& where) {
  const Fields fields(text, where);
  TrainingPosition position;
  position.global_step = fields.integer("global_step");
  position.micro_batch = fields.integer("micro_batch");
  position.loss_sum = fields.number("loss_sum");
  position.num_skipped_updates = fields.integer("num_skipped_updates", position.global_step);
  position.scaler.scale = fields.number("loss_scale");
  if (!(position.scaler.scale > 0 && position.scaler.scale <= std::numeric_limits<double>::max()))
    fields.fail("has no positive number in 'loss_scale'");
  position.scaler.growth_tracker = fields.integer("loss_scale_growth_tracker");
  position.scaler.num_skipped = fields.integer("loss_scale_num_skipped");
  fields.each_pair("best", [&](const std::string& update, std::string_view metric) {
    position.best = {fields.parse_number(metric, "best"),
                     fields.parse_integer(update, "best", position.global_step)};
    position.num_evaluations_since_best = fields.integer("evaluations_since_best");
  });
  const std::int64_t num_ranks = fields.integer("num_ranks", kMostRanks);
  std::map<std::int64_t, std::string> states;
  fields.each_pair("random_state", [&](const std::string& rank, std::string_view state) {
    states[fields.parse_integer(rank, "random_state", num_ranks - 1)] = fields.bytes(state);
  });
  if (num_ranks == 0 || static_cast<std::int64_t>(states.size()) != num_ranks)
    fields.fail(fmt::format("has {} random states of {} ranks", states.size(), num_ranks));
  for (auto& [rank, state] : states) position.random_states.push_back(std::move(state));
  fields.each_pair("micro_batch_of_shape", [&](const std::string& shape, std::string_view size) {
    position.micro_batch_by_shape[shape] =
        fields.parse_integer(size, "micro_batch_of_shape", kMostCount);
  });
  fields.each_pair("setting", [&](const std::string& key, std::string_view value) {
    position.settings[key] = fields.unescaped(value);
  });
  return position;
}

}  // namespace headroom
