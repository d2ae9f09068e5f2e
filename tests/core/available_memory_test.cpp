#include "core/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace headroom {
namespace {

namespace fs = std::filesystem;

// A folder that looks like / to available_memory().
class AvailableMemoryOf : public ::testing::Test {
 protected:
  AvailableMemoryOf()
      : root_(fs::temp_directory_path() /
              ("headroom_memory_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    fs::remove_all(root_);
    write("/proc/meminfo", "MemTotal:  8000000 kB\nMemAvailable:    4000000 kB\n");
  }
  ~AvailableMemoryOf() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  AvailableMemory read() const { return available_memory(root_.string()); }

 private:
  fs::path root_;
};

TEST_F(AvailableMemoryOf, TheMachineIsMemAvailable) {
  EXPECT_EQ(read().bytes, std::int64_t{4000000} * 1024);
  EXPECT_EQ(read().source, "MemAvailable");
}

TEST_F(AvailableMemoryOf, AGroupOfVersion2OrOneAroundItMaySayLess) {
  write("/proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/memory.max", "1000000000\n");
  write("/sys/fs/cgroup/a/memory.current", "300000000\n");
  write("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100000000\n");
  EXPECT_EQ(read().bytes, 800000000) << "cached pages can be dropped";
  EXPECT_EQ(read().source, "/sys/fs/cgroup/a/memory.max");
  write("/sys/fs/cgroup/a/b/memory.high", "500000000\n");
  write("/sys/fs/cgroup/a/b/memory.current", "100000000\n");
  EXPECT_EQ(read().bytes, 400000000);
  write("/sys/fs/cgroup/a/b/memory.current", "600000000\n");
  EXPECT_EQ(read().bytes, 0) << "above its limit already";
}

TEST_F(AvailableMemoryOf, AGroupOfVersion1MaySayLess) {
  write("/proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  write("/proc/self/cgroup", "5:memory:/x\n");
  write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2000000000\n");
  write("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "500000000\n");
  EXPECT_EQ(read().bytes, 1500000000);
  write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read().source, "MemAvailable") << "that number means no limit";
}

}  // namespace
}  // namespace headroom
