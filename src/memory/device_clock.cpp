#include "memory/device_clock.h"

#include "memory/device.h"

namespace headroom {

DeviceClock::time_point DeviceClock::now() {
  metered_device().synchronize();
  return std::chrono::steady_clock::now();
}

}  // namespace headroom
