#pragma once

#include <cstdint>

namespace headroom::testing {

/// The target of a token that has none: what LibTorch's cross-entropy ignores by default.
inline constexpr std::int64_t kPadding = -100;

}  // namespace headroom::testing
