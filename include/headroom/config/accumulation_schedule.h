#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// How many micro-batches make one window, by epoch. `AccumulationSchedule(8)` is eight always;
/// `{{0, 8}, {4, 2}}` is eight from epoch 0 and two from epoch 4 on. A value.
class AccumulationSchedule {
 public:
  /// From `epoch` (counted from 0) on, a window has `steps` micro-batches.
  struct Change {
    std::int64_t epoch;
    std::int64_t steps;
  };

  /// Throws ConfigError unless steps >= 1.
  AccumulationSchedule(
      std::int64_t steps = 1);  // NOLINT(google-explicit-constructor): a number is a schedule
  /// Throws ConfigError unless the first change is at epoch 0, the epochs increase and every steps
  /// >= 1.
  AccumulationSchedule(std::initializer_list<Change> changes);
  explicit AccumulationSchedule(std::vector<Change> changes);

  /// Reads "8" or "0:8,4:2", as on the command line; blanks around numbers are allowed. Throws
  /// ConfigError, quoting the text, otherwise.
  static AccumulationSchedule parse(std::string_view text);

  /// Throws ConfigError for a negative epoch.
  std::int64_t steps_at(std::int64_t epoch) const;
  std::int64_t max_steps() const;
  /// What parse() reads: "8" or "0:8,4:2".
  std::string to_string() const;

  const std::vector<Change>& changes() const { return changes_; }

 private:
  std::vector<Change> changes_;  // at least one, the first at epoch 0
};

}  // namespace headroom
