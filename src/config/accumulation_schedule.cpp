#include <headroom/config/accumulation_schedule.h>

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace headroom {
namespace {

void validate(const std::vector<AccumulationSchedule::Change>& changes) {
  if (changes.empty()) {
    throw ConfigError("an accumulation schedule needs at least one entry, e.g. 8 or 0:8,4:2");
  }
  if (changes.front().epoch != 0) {
    throw ConfigError(
        fmt::format("an accumulation schedule starts at epoch 0, but the first entry is for epoch "
                    "{}; put 0:{} in front",
                    changes.front().epoch, std::max<std::int64_t>(changes.front().steps, 1)));
  }
  for (std::size_t i = 0; i < changes.size(); ++i) {
    if (changes[i].steps < 1) {
      throw ConfigError(fmt::format(
          "{} accumulation steps from epoch {} on; at least 1 is needed (1 means no accumulation)",
          changes[i].steps, changes[i].epoch));
    }
    if (i > 0 && changes[i].epoch <= changes[i - 1].epoch) {
      throw ConfigError(
          fmt::format("the epochs of an accumulation schedule must increase, but {} comes after {}",
                      changes[i].epoch, changes[i - 1].epoch));
    }
  }
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::optional<std::int64_t> parse_number(std::string_view text) {
  text = trimmed(text);
  std::int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || status != std::errc() || end != text.data() + text.size())
    return std::nullopt;
  return value;
}

std::optional<AccumulationSchedule::Change> parse_change(std::string_view text) {
  const auto colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const auto epoch = parse_number(text.substr(0, colon));
  const auto steps = parse_number(text.substr(colon + 1));
  if (!epoch || !steps) return std::nullopt;
  return AccumulationSchedule::Change{*epoch, *steps};
}

std::vector<AccumulationSchedule::Change> parse_changes(std::string_view text) {
  if (const auto steps = parse_number(text)) return {{0, *steps}};
  std::vector<AccumulationSchedule::Change> changes;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t comma = std::min(text.find(',', start), text.size());
    const auto change = parse_change(text.substr(start, comma - start));
    if (!change)
      throw ConfigError("expected a number such as 8, or epoch:steps pairs such as 0:8,4:2");
    changes.push_back(*change);
    start = comma + 1;
  }
  return changes;
}

}  // namespace

AccumulationSchedule::AccumulationSchedule(std::int64_t steps) : changes_{{0, steps}} {
  validate(changes_);
}

AccumulationSchedule::AccumulationSchedule(std::initializer_list<Change> changes)
    : changes_(changes) {
  validate(changes_);
}

AccumulationSchedule::AccumulationSchedule(std::vector<Change> changes)
    : changes_(std::move(changes)) {
  validate(changes_);
}

AccumulationSchedule AccumulationSchedule::parse(std::string_view text) {
  try {
    return AccumulationSchedule(parse_changes(text));
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("accumulation steps '{}': {}", text, error.what()));
  }
}

std::int64_t AccumulationSchedule::steps_at(std::int64_t epoch) const {
  if (epoch < 0)
    throw ConfigError(
        fmt::format("epoch {} of an accumulation schedule: epochs count from 0", epoch));
  std::int64_t steps = changes_.front().steps;
  for (const Change& change : changes_) {
    if (change.epoch > epoch) break;
    steps = change.steps;
  }
  return steps;
}

std::int64_t AccumulationSchedule::max_steps() const {
  std::int64_t steps = 1;
  for (const Change& change : changes_) steps = std::max(steps, change.steps);
  return steps;
}

std::string AccumulationSchedule::to_string() const {
  if (changes_.size() == 1) return std::to_string(changes_.front().steps);
  std::string text;
  for (const Change& change : changes_)
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", change.epoch, change.steps);
  return text;
}

}  // namespace headroom
