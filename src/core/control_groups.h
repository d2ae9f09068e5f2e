#pragma once

#include <functional>
#include <string>

namespace headroom {

/// A folder in which the kernel sets limits for some processes.
struct ControlGroup {
  std::string folder;  ///< without the root
  bool is_version_2 = false;
};

/// Calls `body` for this process's control group and each of the groups around it that is visible
/// here, in every hierarchy with `controller` ("cpu", "memory"). `root` is put before each path
/// that is read, for tests.
void for_each_own_group(const std::string& controller, const std::string& root,
                        const std::function<void(const ControlGroup&)>& body);

}  // namespace headroom
