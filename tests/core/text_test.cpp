#include "core/text.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

TEST(Text, IsSplitIntoThePartsThatAreNotEmpty) {
  using Parts = std::vector<std::string>;
  EXPECT_EQ(split("a,b.*,c", ','), (Parts{"a", "b.*", "c"}));
  EXPECT_EQ(split(",a,,b,", ','), (Parts{"a", "b"}));
  EXPECT_EQ(split("one", ','), Parts{"one"});
  EXPECT_EQ(split("", ','), Parts{});
}

}  // namespace
}  // namespace headroom
