// The code in docs/accumulation.md is code of examples/accumulation.cpp, which is compiled and run.

#include <fstream>
#include <sstream>
#include <string>

#include "support/build_paths.h"

namespace headroom {
namespace {

/// The file's lines without indentation, as one text.
std::string read_lines(const std::string& path) {
  std::ifstream file(std::string(HEADROOM_SOURCE_DIR) + "/" + path);
  EXPECT_TRUE(file.good()) << path;
  std::string text;
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find_first_not_of(' ');
    text += (first == std::string::npos ? "" : line.substr(first)) + "\n";
  }
  return text;
}

TEST(AccumulationDocs, ShowCodeThatIsCompiledAndRun) {
  const std::string page = read_lines("docs/accumulation.md");
  const std::string example = read_lines("examples/accumulation.cpp");
  const std::string fence = "```cpp\n";
  int num_blocks = 0;
  for (std::size_t start = page.find(fence); start != std::string::npos;
       start = page.find(fence, start)) {
    start += fence.size();
    const std::string block = page.substr(start, page.find("```", start) - start);
    EXPECT_NE(example.find(block), std::string::npos) << "not in examples/accumulation.cpp:\n"
                                                      << block;
    ++num_blocks;
  }
  EXPECT_GT(num_blocks, 0);
}

}  // namespace
}  // namespace headroom
