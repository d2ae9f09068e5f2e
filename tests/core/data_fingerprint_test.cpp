#include "core/data_fingerprint.h"
#include "support/idx_files.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

using testing::TemporaryFolder;
using testing::write_plain;

TEST(DataFingerprint, TellsFilesApartByHeadTailAndSize) {
  const TemporaryFolder folder;
  const std::string text(1 << 20, 'a');
  const auto of = [&](const std::string& bytes) {
    write_plain(folder / "file", bytes);
    return data_fingerprint(folder / "file");
  };
  const std::string first = of(text);
  EXPECT_EQ(first.size(), 64U);
  EXPECT_EQ(of(text), first);
  EXPECT_NE(of("b" + text.substr(1)), first);
  EXPECT_NE(of(text.substr(1) + "b"), first);
  EXPECT_NE(of(text + "a"), first);
  EXPECT_NE(of(""), first);
}

TEST(DataFingerprint, TellsFoldersApart) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "data/class");
  write_plain(folder / "data/class/x", "1");
  const std::string first = data_fingerprint(folder / "data");
  write_plain(folder / "data/class/y", "");
  const std::string second = data_fingerprint(folder / "data");
  EXPECT_NE(second, first);
  std::filesystem::rename(folder / "data/class/y", folder / "data/z");
  EXPECT_NE(data_fingerprint(folder / "data"), second);
  std::filesystem::remove(folder / "data/z");
  EXPECT_EQ(data_fingerprint(folder / "data"), first);
  EXPECT_EQ(data_fingerprint("synthetic"), "");
}

}  // namespace
}  // namespace headroom
