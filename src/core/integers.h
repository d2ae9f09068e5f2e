#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace headroom {

/// The product of sizes, or nothing where it does not fit into 64 bits. Factors must not be
/// negative.
inline std::optional<std::int64_t> checked_product(std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  bool overflows = false;
  for (const std::int64_t factor : factors) {
    if (factor == 0) return 0;
    overflows = overflows || __builtin_mul_overflow(product, factor, &product);
  }
  return overflows ? std::nullopt : std::optional<std::int64_t>(product);
}

/// a / b to the next whole number; a >= 0, b > 0.
constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b == 0 ? 0 : 1);
}

}  // namespace headroom
