#include "stop_signals.h"

#include <headroom/core/error.h>
#include <headroom/train/trainer.h>

#include <unistd.h>

#include <csignal>

namespace headroom {
namespace {

volatile std::sig_atomic_t was_signalled = 0;

// Only calls that are allowed in a signal handler. Files are written whole or not at all, so that
// ending in the middle of one does no damage.
void stop_at_signal(int /*signal*/) {
  if (was_signalled != 0) ::_exit(static_cast<int>(ExitCode::kInterrupted));
  was_signalled = 1;
  Trainer::request_stop();
}

}  // namespace

void stop_at_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    ::sigaction(signal, nullptr, &now);
    if (now.sa_handler == SIG_IGN) continue;
    now = {};
    now.sa_handler = stop_at_signal;
    now.sa_flags = SA_RESTART;
    ::sigaction(signal, &now, nullptr);
  }
}

}  // namespace headroom
