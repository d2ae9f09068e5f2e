#include "data/data_folder.h"

#include <headroom/core/error.h>
#include "core/input_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace headroom {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (name.front() != '.') names.push_back(std::move(name));
  }
  if (error)
    throw DataError(fmt::format("{}: cannot be listed: {}", shown_path(folder), error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

DataParts parts_of(const std::string& folder, const std::string& ending) {
  const auto find = [&](const char* name) {
    const std::string path = (fs::path(folder) / (name + ending)).string();
    return (ending.empty() ? is_folder(path) : is_regular_file(path)) ? path : std::string();
  };
  DataParts parts;
  parts.train = find("train");
  for (const char* name : {"val", "valid", "validation", "eval", "test"}) {
    if (parts.eval.empty()) parts.eval = find(name);
  }
  if (parts.train.empty()) parts.eval.clear();
  return parts;
}

}  // namespace headroom
