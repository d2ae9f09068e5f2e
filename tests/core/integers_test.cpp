#include "core/integers.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

constexpr std::int64_t kTwoTo62 = std::int64_t{1} << 62;

TEST(CheckedProduct, IsTheProductOrNothing) {
  EXPECT_EQ(checked_product({}), 1);
  EXPECT_EQ(checked_product({3, 4, 5}), 60);
  EXPECT_EQ(checked_product({kTwoTo62, 1}), kTwoTo62);
  EXPECT_EQ(checked_product({kTwoTo62, 2}), std::nullopt);
  EXPECT_EQ(checked_product({kTwoTo62, 4}), std::nullopt);
  EXPECT_EQ(checked_product({kTwoTo62, 4, 0}), 0);
}

TEST(DivideUp, GivesAPlaceToTheRest) {
  EXPECT_EQ(divide_up(0, 4), 0);
  EXPECT_EQ(divide_up(8, 4), 2);
  EXPECT_EQ(divide_up(9, 4), 3);
  EXPECT_EQ(divide_up(9223372036854775807, 2), kTwoTo62);
}

}  // namespace
}  // namespace headroom
