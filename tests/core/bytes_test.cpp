#include <headroom/core/bytes.h>

#include <headroom/core/error.h>

#include <gtest/gtest.h>

namespace headroom {
namespace {

TEST(ParseBytes, ReadsUnitsOfBothKinds) {
  EXPECT_EQ(parse_bytes("512MiB"), 536870912);
  EXPECT_EQ(parse_bytes("1.5GB"), 1500000000);
  EXPECT_EQ(parse_bytes("6GiB"), 6442450944);
  EXPECT_EQ(parse_bytes(" 64 kib "), 65536);
  EXPECT_EQ(parse_bytes("2M"), 2097152);
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993);
}

TEST(ParseBytes, RejectsNonsenseAndQuotesIt) {
  for (const char* text : {"", " ", "MiB", "-5MiB", "12 parsecs", "1.2.3MB", "1e99", "nan",
                           "99999999999TiB", "5 MiB extra", "0x10", "."}) {
    try {
      parse_bytes(text);
      FAIL() << "accepted '" << text << "'";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("'") + text + "'"), std::string::npos)
          << error.what();
    }
  }
}

TEST(FormatBytes, PrintsForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(536870912), "512.00 MiB");
  EXPECT_EQ(format_bytes(1048575), "1.00 MiB");
  EXPECT_EQ(format_bytes(-2048), "-2.00 KiB");
}

}  // namespace
}  // namespace headroom
