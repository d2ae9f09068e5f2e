#pragma once

namespace headroom::testing {

/// Whether this is a build with a sanitizer, which takes terabytes of addresses and has memory of
/// its own: what a test says about the limits of a process does not hold there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kHasSanitizer = true;
#else
inline constexpr bool kHasSanitizer = false;
#endif

}  // namespace headroom::testing
