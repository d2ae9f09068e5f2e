#pragma once

namespace headroom {

/// From here on SIGINT, SIGTERM and SIGHUP ask the trainer to stop, which then saves a snapshot; a
/// second one ends the program at once with exit code 130. A signal that was ignored when the
/// program was started (nohup) stays ignored.
void stop_at_signals();

}  // namespace headroom
