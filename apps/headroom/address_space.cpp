// Refuses a limit of address space (ulimit -v) in which the libraries cannot start, before they do.
//
// OpenBLAS maps a buffer for each thread while it is loaded, and one more when it first computes;
// where there are no addresses left it tries again for ever, and a static object of LibTorch ends
// the program by an exception. Both happen before main(), so this runs before them: when the
// libraries are mapped, and none of them has run.
#include <headroom/core/error.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace headroom {
namespace {

constexpr long kMiB = 1L << 20;
// What a small training takes beside the mapped libraries: 500 MiB with one thread, 290 MiB more
// with another, on Debian 12.
constexpr long kFirstThreadBytes = 576 * kMiB;
constexpr long kThreadBytes = 320 * kMiB;

// OpenBLAS makes no more threads than there are cores.
long num_threads(char** environment) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const long num_cores =
      ::sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
  constexpr const char* kVariable = "OMP_NUM_THREADS=";
  for (; *environment != nullptr; ++environment) {
    if (std::strncmp(*environment, kVariable, std::strlen(kVariable)) != 0) continue;
    const long given = std::strtol(*environment + std::strlen(kVariable), nullptr, 10);
    if (given > 0) return std::min(given, num_cores);
  }
  return num_cores;
}

// Without C++'s streams, which are not there yet.
long mapped_bytes() {
  char text[64] = {};
  const int file = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t length = ::read(file, text, sizeof(text) - 1);
  ::close(file);
  return length <= 0 ? 0 : std::strtol(text, nullptr, 10) * ::sysconf(_SC_PAGESIZE);
}

void check_address_space(int /*num_words*/, char** /*words*/, char** environment) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const long mapped = mapped_bytes();
  const long threads = num_threads(environment);
  const long needed = mapped + kFirstThreadBytes + (threads - 1) * kThreadBytes;
  if (limit.rlim_cur >= static_cast<rlim_t>(needed)) return;
  char line[256];
  const int length = std::snprintf(
      line, sizeof(line),
      "headroom: the address space is limited to %ld MiB (ulimit -v), but %ld MiB are needed to "
      "start with %ld thread%s%s\n",
      static_cast<long>(limit.rlim_cur) / kMiB, needed / kMiB, threads, threads == 1 ? "" : "s",
      threads == 1 ? "" : "; set OMP_NUM_THREADS to 1, or raise the limit");
  const ssize_t ignored = ::write(STDERR_FILENO, line, static_cast<std::size_t>(length));
  static_cast<void>(ignored);
  ::_exit(static_cast<int>(ExitCode::kBudget));
}

[[gnu::section(".preinit_array"),
  gnu::used]] void (*const check_before_libraries)(int, char**, char**) = check_address_space;

}  // namespace
}  // namespace headroom
