#include "core/thread_priority.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headroom {

void give_way_to_computation() {
#ifdef __linux__
  constexpr int kNice = 10;
  // Linux has it for each thread, by its id.
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice));
#endif
}

}  // namespace headroom
