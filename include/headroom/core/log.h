#pragma once

#include <string>

namespace headroom {

/// Messages for people, on standard error, one line each. Safe to call from any thread.
void log_info(const std::string& message);
void log_warning(const std::string& message);

/// Warns only the first time that `key` is seen in this process.
void log_warning_once(const std::string& key, const std::string& message);

/// Silences log_info (warnings stay), for --disable_tqdm-style quiet runs and for tests.
void set_log_quiet(bool quiet);

}  // namespace headroom
