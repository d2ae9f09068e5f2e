#pragma once

#include <cstddef>
#include <string>

namespace headroom::testing {

/// The bytes with one bit the other way round: `bit` from 0 to below 8 times their number.
inline std::string with_flipped_bit(std::string bytes, std::size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  return bytes;
}

}  // namespace headroom::testing
