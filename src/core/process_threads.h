#pragma once

#include <dirent.h>

#include <cstdlib>

namespace headroom {

/// Calls visit(thread id) for each thread of this process. Threads may begin and end meanwhile.
template <class Visit>
void for_each_thread(const Visit& visit) {
  DIR* threads = opendir("/proc/self/task");
  if (threads == nullptr) return;
  while (const dirent* thread = readdir(threads))
    if (thread->d_name[0] != '.') visit(std::atoi(thread->d_name));
  closedir(threads);
}

}  // namespace headroom
