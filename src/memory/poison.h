#pragma once

// An address sanitizer sees the arenas of the pool as memory that is always valid. These functions
// tell it what is not, so that a kernel that writes past its tensor, or to one that is gone, is
// found. Without the sanitizer they do nothing.

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace headroom {

#ifdef __SANITIZE_ADDRESS__
/// Bytes after the data of a block that nobody may touch.
inline constexpr std::size_t kGuardBytes = 64;
inline void poison(void* begin, std::size_t num_bytes) {
  __asan_poison_memory_region(begin, num_bytes);
}
inline void unpoison(void* begin, std::size_t num_bytes) {
  __asan_unpoison_memory_region(begin, num_bytes);
}
/// Whether the sanitizer would report an access to the byte.
inline bool is_poisoned(const void* byte) { return __asan_address_is_poisoned(byte) != 0; }
#else
inline constexpr std::size_t kGuardBytes = 0;
inline void poison(void* /*begin*/, std::size_t /*num_bytes*/) {}
inline void unpoison(void* /*begin*/, std::size_t /*num_bytes*/) {}
inline bool is_poisoned(const void* /*byte*/) { return false; }
#endif

}  // namespace headroom
