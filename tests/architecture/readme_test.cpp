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

std::vector<std::string> code_blocks(const std::string& document) {
  const std::string fence = "```cpp\n";
  std::vector<std::string> blocks;
  for (std::size_t begin = document.find(fence); begin != std::string::npos;
       begin = document.find(fence, begin)) {
    begin += fence.size();
    const std::size_t end = document.find("```", begin);
    if (end == std::string::npos) break;
    blocks.push_back(document.substr(begin, end - begin));
    begin = end + 3;
  }
  return blocks;
}

void expect_blocks_in(const std::string& document, const std::string& example,
                      std::size_t num_blocks) {
  const fs::path root = HEADROOM_SOURCE_DIR;
  const std::string compiled = read(root / "examples" / example);
  const std::vector<std::string> blocks = code_blocks(read(root / document));
  EXPECT_GE(blocks.size(), num_blocks) << document;
  for (const std::string& block : blocks) {
    EXPECT_NE(compiled.find(block), std::string::npos)
        << document << " shows other code than examples/" << example << " holds:\n"
        << block;
  }
}

TEST(Documents, TheCodeOfTheReadmeIsTheQuickStartExample) {
  expect_blocks_in("README.md", "quick_start.cpp", 1);
}

TEST(Documents, TheCodeForThoseWhoComeFromElsewhereIsCompiled) {
  expect_blocks_in("docs/coming_from.md", "coming_from.cpp", 5);
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
