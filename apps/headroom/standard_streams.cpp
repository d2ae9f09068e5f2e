#include "standard_streams.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>

namespace headroom {

void open_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // Takes the lowest number that is free, which is this one. Standard output is opened for
    // reading: what is printed there is asked for, and its loss is noticed.
    const int opened = ::open("/dev/null", descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY);
    if (opened != descriptor) ::_exit(static_cast<int>(ExitCode::kConfig));
  }
  std::signal(SIGPIPE, SIG_IGN);
}

bool standard_output_failed() {
  std::cout.flush();
  return std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout;
}

void check_standard_output() {
  errno = 0;
  if (!standard_output_failed()) return;
  throw ConfigError(fmt::format("standard output cannot be written{}{}: what was printed is lost",
                                errno != 0 ? ": " : "", errno != 0 ? std::strerror(errno) : ""));
}

}  // namespace headroom
