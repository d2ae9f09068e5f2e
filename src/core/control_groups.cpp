#include "core/control_groups.h"

#include "core/text.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <vector>

namespace headroom {
namespace {

// A control group's folder is `mount` + what `path` has beyond `mounted_root`: inside a container
// the file system often begins at the container's own group.
struct Hierarchy {
  std::string mount;
  std::string mounted_root;
  bool is_version_2 = false;
};

bool has_word(const std::string& list, const std::string& word) {
  const std::vector<std::string> words = split(list, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

// A line of mountinfo: id parent device ROOT MOUNT options [tags] - TYPE source OPTIONS; the source
// may be empty
std::vector<Hierarchy> hierarchies(const std::string& controller, const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (dash - words.begin() < 6 || words.end() - dash < 3) continue;
    const bool is_version_2 = dash[1] == "cgroup2";
    if (!is_version_2 && !(dash[1] == "cgroup" && has_word(words.back(), controller))) continue;
    found.push_back({words[4], words[3] == "/" ? "" : words[3], is_version_2});
  }
  return found;
}

// A line of /proc/self/cgroup: id:controllers:path, without controllers for version 2.
std::optional<std::string> own_group(const std::string& controller, const std::string& root,
                                     bool is_version_2) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (is_version_2 ? controllers.empty() : has_word(controllers, controller))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

}  // namespace

void for_each_own_group(const std::string& controller, const std::string& root,
                        const std::function<void(const ControlGroup&)>& body) {
  for (const Hierarchy& hierarchy : hierarchies(controller, root)) {
    const auto group = own_group(controller, root, hierarchy.is_version_2);
    if (!group) continue;
    const std::string& above = hierarchy.mounted_root;
    std::string path =
        group->compare(0, above.size(), above) == 0 ? group->substr(above.size()) : std::string();
    while (true) {
      if (!path.empty() && path.back() == '/') path.pop_back();
      body({hierarchy.mount + path, hierarchy.is_version_2});
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
}

}  // namespace headroom
