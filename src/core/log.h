#pragma once

#include <headroom/core/runtime.h>  // set_log_quiet

#include <string>

namespace headroom {

/// Messages for people, on standard error, one line each. Safe to call from any thread.
void log_info(const std::string& message);
void log_warning(const std::string& message);

/// Warns only the first time that `key` is seen in this process.
void log_warning_once(const std::string& key, const std::string& message);

}  // namespace headroom
