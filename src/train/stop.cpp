#include "train/stop.h"

#include <atomic>

namespace headroom {
namespace {

std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

}  // namespace

void request_stop() noexcept { requested = true; }

bool stop_is_requested() noexcept { return requested; }

void throw_if_stopped() {
  if (requested) throw Stopped();
}

StopScope::~StopScope() { requested = false; }

}  // namespace headroom
