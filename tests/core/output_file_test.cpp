// Files that are written whole or not at all, and only over files.
#include "core/output_file.h"
#include "support/idx_files.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <csignal>
#include <string>

namespace headroom {
namespace {

namespace fs = std::filesystem;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_plain;

std::size_t num_files(const TemporaryFolder& folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder.path())) ++count;
  return count;
}

TEST(OutputFile, AppearsWholeAtItsCommit) {
  const TemporaryFolder folder;
  write_plain(folder / "file", "old");
  {
    OutputFile file(folder / "file");
    file.write("ne");
    EXPECT_EQ(read_file(folder / "file"), "old");
    file.write("w");
    file.commit();
  }
  EXPECT_EQ(read_file(folder / "file"), "new");
  EXPECT_EQ(num_files(folder), 1U);
}

TEST(OutputFile, LeavesNothingWithoutACommit) {
  const TemporaryFolder folder;
  OutputFile(folder / "file").write("half");
  EXPECT_EQ(num_files(folder), 0U);
}

TEST(OutputFile, WritesIntoDevicesAndPipesInsteadOfReplacingThem) {
  const TemporaryFolder folder;
  // As root, a rename would replace the machine's own device: a link to it shows the same.
  fs::create_symlink("/dev/null", folder / "null");
  write_file_atomically(folder / "null", "gone");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_TRUE(fs::is_symlink(folder / "null"));
  if (::geteuid() == 0 &&
      ::mknod((folder / "device").c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0) {
    try {
      write_file_atomically(folder / "device", "gone");
    } catch (const ConfigError&) {  // a file system that opens no devices
    }
    EXPECT_TRUE(fs::is_character_file(folder / "device"));
  }
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(write_file_atomically(folder / "pipe", "nobody reads"), ConfigError);
  const int reader = ::open((folder / "pipe").c_str(), O_RDONLY | O_NONBLOCK);
  write_file_atomically(folder / "pipe", "text");
  char text[8] = {};
  EXPECT_EQ(::read(reader, text, sizeof(text)), 4);
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
}

TEST(OutputFile, RefusesFoldersAndReplacesWhatALinkPointsTo) {
  const TemporaryFolder folder;
  EXPECT_THROW(write_file_atomically(folder.path().string(), "x"), ConfigError);
  EXPECT_THROW(write_file_atomically(folder / "absent/file", "x"), ConfigError);
  EXPECT_THROW(write_file_atomically(folder / std::string(5000, 'x'), "x"), ConfigError);
  fs::create_symlink(folder / "loop", folder / "loop");
  EXPECT_THROW(write_file_atomically(folder / "loop", "x"), ConfigError);
  write_plain(folder / "file", "old");
  fs::create_symlink(folder / "file", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "file"), "new");
}

TEST(OutputFile, AFullDiskKeepsTheOldFile) {
  const TemporaryFolder folder;
  write_plain(folder / "file", "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{100, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(write_file_atomically(folder / "file", std::string(1000, 'x')), ConfigError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_file(folder / "file"), "old");
  EXPECT_EQ(num_files(folder), 1U);
}

TEST(SyncFolder, OneThatCannotBeOpenedIsAnError) {
  const TemporaryFolder folder;
  sync_folder(folder.path().string(), throw_as<SnapshotError>);
  EXPECT_THROW(sync_folder(folder / "absent", throw_as<SnapshotError>), SnapshotError);
}

}  // namespace
}  // namespace headroom
