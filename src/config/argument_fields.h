#pragma once

// The table of flags: what train, plan, compare and estimate take, what a configuration file may
// say, and what the rest of the library must know about each of them.

#include <headroom/config/training_arguments.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// What others must know about a flag.
enum class FieldTrait : unsigned {
  kNone = 0,
  kPerRank = 1,       ///< each rank may have its own value; other flags must be alike on all ranks
  kInSnapshot = 2,    ///< a snapshot is resumed only with the same value
  kAffectsCosts = 4,  ///< changes what stages cost: measured costs are kept for one value
};
constexpr FieldTrait operator|(FieldTrait a, FieldTrait b) {
  return static_cast<FieldTrait>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}

/// One flag, which is also one key of a configuration file.
struct ArgumentField {
  std::string name;
  std::string help;
  bool value_is_optional = false;  ///< the flag may stand alone; then it means `value_when_alone`
  std::string value_when_alone;
  std::string range;  ///< the values allowed, for people; empty where any text is taken
  FieldTrait traits = FieldTrait::kNone;
  /// Reads the value from text. Throws ConfigError when the text does not fit the type.
  std::function<void(TrainingArguments&, const std::string&)> set;
  /// The value as text that `set` reads to the same value.
  std::function<std::string(const TrainingArguments&)> get;
  /// Throws ConfigError when the value is outside of `range`.
  std::function<void(const TrainingArguments&)> check;

  bool has(FieldTrait trait) const {
    return (static_cast<unsigned>(traits) & static_cast<unsigned>(trait)) != 0;
  }
};

/// Every flag, in the order of --help.
const std::vector<ArgumentField>& argument_fields();

/// Flags with their values, in the order of --help.
using Settings = std::vector<std::pair<std::string, std::string>>;
Settings settings_with(FieldTrait trait, const TrainingArguments& arguments);
Settings settings_without(FieldTrait trait, const TrainingArguments& arguments);

/// Throws ConfigError: the flag, its value and what was expected.
[[noreturn]] void reject_argument(const std::string& name, const std::string& value,
                                  const std::string& expectation);

/// Throws ConfigError, naming the nearest, unless `value` is one of `allowed`.
void require_one_of(const std::string& name, const std::string& value,
                    const std::vector<std::string>& allowed);

/// The most samples that one update may take, whatever they are multiplied from: small enough that
/// the bytes of any model times this stay inside 64 bits.
constexpr std::int64_t kMaxBatchSamples = 100'000'000;

}  // namespace headroom
