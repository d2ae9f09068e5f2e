#include <headroom/core/bytes.h>

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

namespace headroom {
namespace {

constexpr double kKilo = 1000.0;
constexpr double kKibi = 1024.0;

const std::array<std::pair<const char*, double>, 14> kUnits = {
    {{"", 1},
     {"b", 1},
     {"k", kKibi},
     {"m", kKibi* kKibi},
     {"g", kKibi* kKibi* kKibi},
     {"t", kKibi* kKibi* kKibi* kKibi},
     {"kb", kKilo},
     {"mb", kKilo* kKilo},
     {"gb", kKilo* kKilo* kKilo},
     {"tb", kKilo* kKilo* kKilo* kKilo},
     {"kib", kKibi},
     {"mib", kKibi* kKibi},
     {"gib", kKibi* kKibi* kKibi},
     {"tib", kKibi* kKibi* kKibi* kKibi}}};

[[noreturn]] void reject(std::string_view text, const char* why) {
  throw ConfigError(fmt::format(
      "'{}' is not a number of bytes: {} (write e.g. 512MiB, 1.5GB or 4096)", text, why));
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.remove_suffix(1);
  return text;
}

}  // namespace

std::int64_t parse_bytes(std::string_view text) {
  const std::string_view trimmed = trim(text);
  const std::size_t digits_end = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string_view digits = trimmed.substr(0, digits_end);
  if (digits.empty()) reject(text, "it does not start with a number");

  std::string unit(trim(trimmed.substr(digits_end)));
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto found = std::find_if(kUnits.begin(), kUnits.end(),
                                  [&](const auto& entry) { return unit == entry.first; });
  if (found == kUnits.end()) reject(text, "unknown unit");

  // Whole bytes are read as integers, so that sizes above 2^53 stay exact.
  std::int64_t whole = 0;
  const char* end = digits.data() + digits.size();
  if (const auto [stop, error] = std::from_chars(digits.data(), end, whole);
      found->second == 1 && stop == end && error == std::errc())
    return whole;

  double value = 0;
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || stop != end) reject(text, "malformed number");
  const double bytes = std::floor(value * found->second);
  if (!(bytes < 9223372036854775808.0)) reject(text, "too large");
  return static_cast<std::int64_t>(bytes);
}

std::string format_bytes(std::int64_t bytes) {
  const double magnitude = std::abs(static_cast<double>(bytes));
  if (magnitude < kKibi) return fmt::format("{} B", bytes);
  const char* const names[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / kKibi;
  int index = 0;
  // A value that would print as 1024.00 belongs to the next unit.
  while (index < 3 && std::abs(value) >= kKibi - 0.005) {
    value /= kKibi;
    ++index;
  }
  return fmt::format("{:.2f} {}", value, names[index]);
}

}  // namespace headroom
