// Files that somebody else wrote: whatever is at the path, the answer is the bytes or one line.
#include "core/input_file.h"
#include "support/idx_files.h"

#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace headroom {
namespace {

using testing::TemporaryFolder;
using testing::write_plain;

std::string refusal(const std::string& path) {
  try {
    InputFile(path, throw_as<SnapshotError>).read_all(1 << 20);
  } catch (const SnapshotError& error) {
    return error.what();
  }
  return "";
}

TEST(InputFile, GivesTheBytesOfARegularFile) {
  const TemporaryFolder folder;
  const std::string bytes("a\0b\n", 4);
  write_plain(folder / "file", bytes);
  std::filesystem::create_symlink(folder / "file", folder / "link");
  const InputFile file(folder / "link");
  EXPECT_EQ(file.size(), 4);
  EXPECT_EQ(file.read_all(4), bytes);
  char piece[2];
  file.read_at(1, piece, 2);
  EXPECT_EQ(std::string(piece, 2), std::string("\0b", 2));
}

TEST(InputFile, RefusesWhatIsNoFileInOneLineOfTheKindAskedFor) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(folder / "loop", folder / "loop");
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string socket_path = folder / "socket";
  std::copy(socket_path.begin(), socket_path.end(), address.sun_path);
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  for (const std::string& path :
       {folder.path().string(), folder / "pipe", folder / "loop", folder / "absent", socket_path,
        std::string("/dev/zero"), std::string("/dev/null"), std::string("/dev/tty"), std::string(),
        std::string(5000, 'x'), folder / "two\nlines", std::string("a\0b", 3)}) {
    const std::string message = refusal(path);
    EXPECT_FALSE(message.empty()) << path;
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 0) << message;
    EXPECT_LT(message.size(), 400U) << message;
    EXPECT_FALSE(is_regular_file(path) && path.find('\0') == std::string::npos) << path;
  }
  EXPECT_NE(refusal(folder / "pipe").find("is a pipe, not a file"), std::string::npos);
  EXPECT_NE(refusal("/dev/zero").find("is a device"), std::string::npos);
  ::close(socket);
}

TEST(InputFile, RefusesWhatIsTooLongBeforeItIsRead) {
  const TemporaryFolder folder;
  write_plain(folder / "large", "");
  std::filesystem::resize_file(folder / "large", std::uintmax_t{1} << 40);  // takes no disk
  EXPECT_NE(refusal(folder / "large").find("larger than 1048576"), std::string::npos);
}

TEST(InputFile, AFileThatWasCutIsAnErrorAndNoSignal) {
  const TemporaryFolder folder;
  write_plain(folder / "file", std::string(10000, 'x'));
  const InputFile file(folder / "file");
  std::filesystem::resize_file(folder / "file", 100);
  char byte = 0;
  file.read_at(99, &byte, 1);
  EXPECT_THROW(file.read_at(5000, &byte, 1), DataError);
}

TEST(InputFile, JsonIsReadToALimitedDepth) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_TRUE(json_depth_is_allowed(nested(kMostJsonDepth)));
  EXPECT_FALSE(json_depth_is_allowed(nested(kMostJsonDepth + 1)));
  EXPECT_FALSE(json_depth_is_allowed(std::string(1000000, '{')));
  const std::string brackets(1000, '[');
  EXPECT_TRUE(json_depth_is_allowed("{\"a\\\"" + brackets + "\": \"" + brackets + "\"}"));
  const TemporaryFolder folder;
  write_plain(folder / "deep.json", nested(1000000));
  EXPECT_THROW(read_json_text(folder / "deep.json"), DataError);
  write_plain(folder / "flat.json", "{}");
  EXPECT_EQ(read_json_text(folder / "flat.json"), "{}");
}

}  // namespace
}  // namespace headroom
