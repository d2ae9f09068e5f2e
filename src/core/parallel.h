#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace headroom {

/// at::parallel_for whose start and end a thread sanitizer can see: it does not know how OpenMP's
/// threads wait for each other, and would take every loop for a race. Calls body(begin, end) for
/// parts of [begin, end) of at least `grain`.
template <class Body>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body& body) {
#ifdef __SANITIZE_THREAD__
  char started = 0, ended = 0;  // their addresses stand for the two events
  __tsan_release(&started);
  at::parallel_for(begin, end, grain, [&](std::int64_t part_begin, std::int64_t part_end) {
    __tsan_acquire(&started);
    body(part_begin, part_end);
    __tsan_release(&ended);
  });
  __tsan_acquire(&ended);
#else
  at::parallel_for(begin, end, grain, body);
#endif
}

}  // namespace headroom
