#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <unordered_set>

namespace headroom {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto created = std::make_shared<spdlog::logger>(
        "headroom", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    created->set_pattern("%^%v%$");
    return created;
  }();
  return *instance;
}

}  // namespace

void log_info(const std::string& message) { logger().info("{}", message); }

void log_warning(const std::string& message) { logger().warn("warning: {}", message); }

void log_warning_once(const std::string& key, const std::string& message) {
  static std::mutex mutex;
  static std::unordered_set<std::string> seen;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!seen.insert(key).second) return;
  }
  log_warning(message);
}

void set_log_quiet(bool quiet) {
  logger().set_level(quiet ? spdlog::level::warn : spdlog::level::info);
}

}  // namespace headroom
