// Holds the documents to the project: what they show is compiled, and what they link to is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "support/build_paths.h"

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(Documents, TheCodeOfTheReadmeIsTheQuickStartExample) {
  const std::string readme = read(fs::path(HEADROOM_SOURCE_DIR) / "README.md");
  const std::string example = read(fs::path(HEADROOM_SOURCE_DIR) / "examples" / "quick_start.cpp");
  const std::string fence = "```cpp\n";
  const std::size_t begin = readme.find(fence);
  ASSERT_NE(begin, std::string::npos);
  const std::size_t end = readme.find("```", begin + fence.size());
  ASSERT_NE(end, std::string::npos);
  const std::string code = readme.substr(begin + fence.size(), end - begin - fence.size());
  EXPECT_GT(std::count(code.begin(), code.end(), '\n'), 8);
  EXPECT_NE(example.find(code), std::string::npos)
      << "README.md shows other code than examples/quick_start.cpp holds:\n"
      << code;
}

// Each block of code is in the file that was named last before it.
TEST(Documents, TheCodeOfExtendingIsCompiled) {
  const fs::path root = HEADROOM_SOURCE_DIR;
  const std::string text = read(root / "docs" / "extending.md");
  const std::string fence = "```cpp\n";
  const std::regex path_pattern("`((src|tests)/[a-z_/]+\\.cpp)`");
  int num_blocks = 0;
  for (std::size_t begin = text.find(fence); begin != std::string::npos;
       begin = text.find(fence, begin + 1)) {
    const std::string before = text.substr(0, begin);
    std::string path;
    for (std::sregex_iterator it(before.begin(), before.end(), path_pattern), end; it != end; ++it)
      path = (*it)[1];
    const std::size_t end = text.find("```\n", begin + fence.size());
    const std::string code = text.substr(begin + fence.size(), end - begin - fence.size());
    EXPECT_NE(read(root / path).find(code), std::string::npos) << path << " does not hold\n"
                                                               << code;
    ++num_blocks;
  }
  EXPECT_EQ(num_blocks, 5);
}

TEST(Documents, EveryRelativeLinkLeadsSomewhere) {
  const fs::path root = HEADROOM_SOURCE_DIR;
  const std::regex link("\\]\\(([^)# ]+)(#[^) ]*)?\\)");  // a lambda in code has blanks
  std::vector<fs::path> documents = {root / "README.md", root / "CHANGELOG.md",
                                     root / "CONTRIBUTING.md"};
  for (const auto& entry : fs::directory_iterator(root / "docs")) {
    if (entry.path().extension() == ".md") documents.push_back(entry.path());
  }
  int count = 0;
  for (const fs::path& document : documents) {
    const std::string text = read(document);
    for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it) {
      const std::string target = (*it)[1];
      if (target.find("://") != std::string::npos) continue;
      ++count;
      EXPECT_TRUE(fs::exists(document.parent_path() / target))
          << document << " links to " << target;
    }
  }
  EXPECT_GT(count, 5);
}

}  // namespace
