#pragma once

#include <algorithm>
#include <cstdlib>

namespace headroom::testing {

/// How often a loop is run: `count`, and HEADROOM_TEST_SCALE times as often where that is set.
inline int scaled(int count) {
  const char* scale = std::getenv("HEADROOM_TEST_SCALE");
  return count * std::max(1, scale == nullptr ? 1 : std::atoi(scale));
}

}  // namespace headroom::testing
