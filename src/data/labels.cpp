#include "data/labels.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace headroom {
namespace {

std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || stop != text.data() + text.size())
    return std::nullopt;
  return value;
}

// Names that say nothing but their number.
bool are_generic(const LabelNames& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] != "LABEL_" + std::to_string(i)) return false;
  }
  return !names.empty();
}

LabelNames ordered(const std::set<std::string>& labels) {
  LabelNames names(labels.begin(), labels.end());
  const bool are_numbers = std::all_of(names.begin(), names.end(), [](const std::string& label) {
    return whole_number(label).has_value();
  });
  if (are_numbers) {
    std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
      return std::pair(whole_number(a), a) < std::pair(whole_number(b), b);
    });
  }
  return names;
}

}  // namespace

LabelMap::LabelMap(LabelNames names) : names_(std::move(names)) {
  const bool by_number = are_generic(names_);
  for (std::size_t i = 0; i < names_.size(); ++i) {
    numbers_.emplace(names_[i], static_cast<std::int64_t>(i));
    if (by_number) numbers_.emplace(std::to_string(i), static_cast<std::int64_t>(i));
  }
}

LabelMap map_labels(const std::vector<std::string>& labels, const LabelNames& of_model,
                    bool must_be_known, const std::function<void(const std::string&)>& refuse) {
  const std::set<std::string> distinct(labels.begin(), labels.end());
  LabelMap known(of_model);
  const auto unknown = std::find_if(distinct.begin(), distinct.end(),
                                    [&](const std::string& label) { return !known.has(label); });
  if (unknown == distinct.end()) return known;
  if (must_be_known) refuse(*unknown);
  return LabelMap(ordered(distinct));
}

}  // namespace headroom
