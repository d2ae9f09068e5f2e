#include "report/table.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

TEST(Table, AlignsTheFirstColumnLeftAndTheOthersRight) {
  Table table({"", "time", "peak"});
  table.add_row({"plain", "1.0 s", "10 MiB"}).add_row({"+ accumulation", "12.5 s", "4 MiB"});
  EXPECT_EQ(table.to_text(),
            "                  time    peak\n"
            "------------------------------\n"
            "plain            1.0 s  10 MiB\n"
            "+ accumulation  12.5 s   4 MiB\n");
}

TEST(Table, MissingCellsAreEmptyAndLeaveNoBlanksAtTheEnd) {
  Table table({"name", "a", "b"});
  table.add_row({"planned", "does not fit"});
  EXPECT_EQ(table.to_text(),
            "name                a  b\n"
            "------------------------\n"
            "planned  does not fit\n");
}

}  // namespace
}  // namespace headroom
