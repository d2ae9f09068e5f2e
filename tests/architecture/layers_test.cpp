// Holds the order of the layers: a layer includes only layers of lower level, and some libraries
// stay in their layers.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "support/build_paths.h"

namespace {

namespace fs = std::filesystem;

const std::map<std::string, int> kLevels = {
    {"core", 0},   {"config", 1}, {"ops", 1},   {"data", 2}, {"model", 2},   {"comm", 2},
    {"report", 2}, {"memory", 3}, {"optim", 3}, {"plan", 4}, {"execute", 5}, {"train", 6}};

struct Include {
  std::string file;  // relative to the project
  std::string layer;
  std::string target;
  bool is_source;
};

std::vector<Include> all_includes() {
  const fs::path root = HEADROOM_SOURCE_DIR;
  const std::regex line_pattern("^\\s*#\\s*include\\s*[<\"]([^>\"]+)[>\"]");
  std::vector<Include> includes;
  for (const char* base : {"include/headroom", "src"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / base)) {
      const std::string ending = entry.path().extension();
      if (ending != ".h" && ending != ".cpp") continue;
      const fs::path inside = fs::relative(entry.path(), root / base);
      if (inside.begin() == --inside.end()) continue;  // headroom.h, which includes every layer
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        std::smatch match;
        if (!std::regex_search(line, match, line_pattern)) continue;
        includes.push_back({fs::relative(entry.path(), root).string(), inside.begin()->string(),
                            match[1], ending == ".cpp"});
      }
    }
  }
  return includes;
}

std::string layer_of(const std::string& target) {
  std::string path = target;
  if (path.rfind("headroom/", 0) == 0) path = path.substr(9);
  if (path.find('/') == std::string::npos) return "";  // <memory>, say, is no layer
  const std::string first = path.substr(0, path.find('/'));
  return kLevels.count(first) != 0 ? first : "";
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool is_torch(const std::string& target) {
  return starts_with(target, "torch/") || starts_with(target, "ATen/") ||
         starts_with(target, "c10/");
}

TEST(Architecture, ThereAreFilesToCheck) { EXPECT_GT(all_includes().size(), 200U); }

TEST(Architecture, ALayerIncludesOnlyLowerLevels) {
  for (const Include& include : all_includes()) {
    ASSERT_EQ(kLevels.count(include.layer), 1U) << include.file << " is in a layer without a level";
    const std::string target = layer_of(include.target);
    if (target.empty() || target == include.layer) continue;
    EXPECT_LT(kLevels.at(target), kLevels.at(include.layer))
        << include.file << " includes " << include.target;
  }
}

TEST(Architecture, PlanConfigAndReportAreFreeOfTorch) {
  for (const Include& include : all_includes()) {
    if (include.layer != "plan" && include.layer != "config" && include.layer != "report") continue;
    EXPECT_FALSE(is_torch(include.target)) << include.file << " includes " << include.target;
  }
}

TEST(Architecture, LibrariesStayInTheirLayers) {
  for (const Include& include : all_includes()) {
    EXPECT_FALSE(starts_with(include.target, "CLI/")) << include.file << ": CLI11 belongs to apps";
    if (starts_with(include.target, "nlohmann/")) {
      EXPECT_TRUE(include.is_source && (include.layer == "config" || include.layer == "report" ||
                                        include.layer == "data" || include.layer == "model"))
          << include.file;
    }
    if (starts_with(include.target, "spdlog/")) {
      EXPECT_TRUE(include.is_source && include.layer == "core") << include.file;
    }
    if (starts_with(include.target, "torch/csrc/jit/") || include.target == "torch/script.h") {
      EXPECT_TRUE(starts_with(include.file, "src/model/script_")) << include.file;
    }
    if (include.target.find("c10d") != std::string::npos) {
      EXPECT_TRUE(include.is_source && include.layer == "comm") << include.file;
    }
  }
}

void reach(const fs::path& include_folder, const std::string& header, std::set<std::string>& all) {
  if (!all.insert(header).second) return;
  std::ifstream file(include_folder / header);
  const std::regex pattern("^#include <(headroom/[^>]+)>");
  for (std::string line; std::getline(file, line);) {
    std::smatch match;
    if (std::regex_search(line, match, pattern)) reach(include_folder, match[1], all);
  }
}

TEST(Architecture, OneHeaderBringsEveryPublicName) {
  const fs::path folder = fs::path(HEADROOM_SOURCE_DIR) / "include";
  std::set<std::string> reached;
  reach(folder, "headroom/headroom.h", reached);
  int num_headers = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    ++num_headers;
    const std::string name = fs::relative(entry.path(), folder).string();
    EXPECT_EQ(reached.count(name), 1U) << name << " is not included by headroom/headroom.h";
  }
  EXPECT_GT(num_headers, 20);
}

// at::parallel_for itself would look like a race to a thread sanitizer.
TEST(Architecture, LoopsOnAllThreadsGoThroughCore) {
  const fs::path root = fs::path(HEADROOM_SOURCE_DIR) / "src";
  int num_loops = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    const std::string inside = fs::relative(entry.path(), root).string();
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      if (line.find("parallel_for(") == std::string::npos) continue;
      ++num_loops;
      EXPECT_TRUE(inside == "core/parallel.h" ||
                  line.find("at::parallel_for(") == std::string::npos)
          << inside << ": " << line;
    }
  }
  EXPECT_GT(num_loops, 5);
}

}  // namespace
