#include "core/nearest_name.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

TEST(NearestName, CountsInsertionsDeletionsSubstitutionsAndSwaps) {
  const std::vector<std::string> names = {"kitten", "sitting", "saturday"};
  EXPECT_EQ(nearest_name("kiten", names), "kitten");
  EXPECT_EQ(nearest_name("ssitting", names), "sitting");
  EXPECT_EQ(nearest_name("sunday", names), "saturday");
  EXPECT_EQ(nearest_name("", {"abc", "a"}), "a");
  EXPECT_EQ(nearest_name("mpl", {"gpt", "mlp"}), "mlp");
}

}  // namespace
}  // namespace headroom
