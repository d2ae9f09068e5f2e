#include "stop_signals.h"

#include <headroom/core/error.h>
#include <headroom/train/trainer.h>

#include <unistd.h>

#include <csignal>

namespace headroom {
namespace {

constexpr const char kNothingTrained[] = "headroom: interrupted before training began\n";

volatile std::sig_atomic_t is_spoken = 0;
volatile std::sig_atomic_t was_signalled = 0;

// In handlers, only calls that are allowed there. Files are written whole or not at all, so that
// ending in the middle of one does no damage.
[[noreturn]] void end() { ::_exit(static_cast<int>(ExitCode::kInterrupted)); }

void end_at_signal(int /*signal*/) {
  if (is_spoken != 0 && ::write(STDERR_FILENO, kNothingTrained, sizeof(kNothingTrained) - 1) < 0) {
    // Nobody can be told.
  }
  end();
}

void stop_at_signal(int /*signal*/) {
  if (was_signalled != 0) end();
  was_signalled = 1;
  Trainer::request_stop();
}

void handle_signals(void (*handler)(int)) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    ::sigaction(signal, nullptr, &now);
    if (signal == SIGHUP && now.sa_handler == SIG_IGN) continue;
    now = {};
    now.sa_handler = handler;
    now.sa_flags = SA_RESTART;
    ::sigaction(signal, &now, nullptr);
  }
}

}  // namespace

void end_at_signals(bool speaks) {
  is_spoken = speaks ? 1 : 0;
  handle_signals(end_at_signal);
}

void stop_at_signals() { handle_signals(stop_at_signal); }

}  // namespace headroom
