#pragma once

// Random numbers by counter: they depend on what they are drawn for alone, so that samples come out
// the same in any order.

#include <cstdint>

namespace headroom {

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

inline std::uint64_t draw(std::uint64_t seed, std::int64_t index, std::int64_t position) {
  return mix(mix(seed ^ mix(static_cast<std::uint64_t>(index))) +
             static_cast<std::uint64_t>(position));
}

}  // namespace headroom
