// Holds the order of the rooms: a room includes only rooms of lower rank, and some libraries stay in their rooms.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

const std::map<std::string, int> kRanks = {{"core", 0},   {"config", 1}, {"ops", 1},   {"data", 2}, {"model", 2},   {"comm", 2},
                                           {"report", 2}, {"memory", 3}, {"optim", 3}, {"plan", 4}, {"execute", 5}, {"train", 6}};

struct Include {
  std::string file;  // relative to the project
  std::string room;
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
      if (inside.begin() == --inside.end()) continue;  // headroom.h, which includes every room
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        std::smatch match;
        if (!std::regex_search(line, match, line_pattern)) continue;
        includes.push_back({fs::relative(entry.path(), root).string(), inside.begin()->string(), match[1], ending == ".cpp"});
      }
    }
  }
  return includes;
}

std::string room_of(const std::string& target) {
  std::string path = target;
  if (path.rfind("headroom/", 0) == 0) path = path.substr(9);
  if (path.find('/') == std::string::npos) return "";  // <memory>, say, is no room
  const std::string first = path.substr(0, path.find('/'));
  return kRanks.count(first) != 0 ? first : "";
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool is_torch(const std::string& target) {
  return starts_with(target, "torch/") || starts_with(target, "ATen/") || starts_with(target, "c10/");
}

TEST(House, ThereAreFilesToCheck) { EXPECT_GT(all_includes().size(), 200U); }

TEST(House, ARoomIncludesOnlyRoomsOfLowerRank) {
  for (const Include& include : all_includes()) {
    ASSERT_EQ(kRanks.count(include.room), 1U) << include.file << " is in a room without a rank";
    const std::string target = room_of(include.target);
    if (target.empty() || target == include.room) continue;
    EXPECT_LT(kRanks.at(target), kRanks.at(include.room)) << include.file << " includes " << include.target;
  }
}

TEST(House, PlanConfigAndReportAreFreeOfTorch) {
  for (const Include& include : all_includes()) {
    if (include.room != "plan" && include.room != "config" && include.room != "report") continue;
    EXPECT_FALSE(is_torch(include.target)) << include.file << " includes " << include.target;
  }
}

TEST(House, LibrariesStayInTheirRooms) {
  for (const Include& include : all_includes()) {
    EXPECT_FALSE(starts_with(include.target, "CLI/")) << include.file << ": CLI11 belongs to apps";
    if (starts_with(include.target, "nlohmann/")) {
      EXPECT_TRUE(include.is_source && (include.room == "config" || include.room == "report")) << include.file;
    }
    if (starts_with(include.target, "spdlog/")) {
      EXPECT_TRUE(include.is_source && include.room == "core") << include.file;
    }
    if (include.target.find("c10d") != std::string::npos) {
      EXPECT_TRUE(include.is_source && include.room == "comm") << include.file;
    }
  }
}

// at::parallel_for itself would look like a race to a thread sanitizer.
TEST(House, LoopsOnAllThreadsGoThroughCore) {
  const fs::path root = fs::path(HEADROOM_SOURCE_DIR) / "src";
  int num_loops = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    const std::string inside = fs::relative(entry.path(), root).string();
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      if (line.find("parallel_for(") == std::string::npos) continue;
      ++num_loops;
      EXPECT_TRUE(inside == "core/parallel.h" || line.find("at::parallel_for(") == std::string::npos) << inside << ": " << line;
    }
  }
  EXPECT_GT(num_loops, 5);
}

}  // namespace
