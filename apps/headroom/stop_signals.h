#pragma once

namespace headroom {

/// Until stop_at_signals() is called, SIGINT, SIGTERM and SIGHUP end the program with exit code
/// 130, and with a line on standard error where `speaks`: nothing was trained that could be lost,
/// and waiting for other ranks or reading data may take long.
void end_at_signals(bool speaks);

/// From here on they ask the trainer to stop, which then saves a snapshot; a second one ends the
/// program at once with exit code 130. In both, SIGHUP stays ignored where it was when the program
/// was started (nohup).
void stop_at_signals();

}  // namespace headroom
