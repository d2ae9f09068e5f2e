#include "core/cpu_quota.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace headroom {
namespace {

namespace fs = std::filesystem;

// A folder that looks like / to cpu_quota().
class CpuQuotaOf : public ::testing::Test {
 protected:
  CpuQuotaOf()
      : root_(fs::temp_directory_path() /
              ("headroom_quota_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    fs::remove_all(root_);
  }
  ~CpuQuotaOf() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::optional<CpuQuota> read() const { return cpu_quota(root_.string()); }

 private:
  fs::path root_;
};

constexpr const char* kMountOfVersion2 =
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* kMountOfVersion1 =
    "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n";

TEST_F(CpuQuotaOf, Version2IsTheLeastOfTheGroupAndItsParents) {
  write("/proc/self/mountinfo", kMountOfVersion2);
  write("/proc/self/cgroup", "0::/system.slice/job.service\n");
  write("/sys/fs/cgroup/system.slice/cpu.max", "150000 100000\n");
  write("/sys/fs/cgroup/system.slice/job.service/cpu.max", "400000 100000\n");
  const auto quota = read();
  ASSERT_TRUE(quota);
  EXPECT_DOUBLE_EQ(quota->num_cpus, 1.5);
  EXPECT_EQ(quota->file, "/sys/fs/cgroup/system.slice/cpu.max");
}

TEST_F(CpuQuotaOf, Version2WithoutALimitIsNone) {
  write("/proc/self/mountinfo", kMountOfVersion2);
  write("/proc/self/cgroup", "0::/user.slice\n");
  write("/sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  EXPECT_FALSE(read());
}

TEST_F(CpuQuotaOf, Version1IsReadWhereTheCpuControllerIs) {
  write("/proc/self/mountinfo", kMountOfVersion1);
  write("/proc/self/cgroup", "4:memory:/other\n3:cpu,cpuacct:/box\n");
  write("/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "50000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  const auto quota = read();
  ASSERT_TRUE(quota);
  EXPECT_DOUBLE_EQ(quota->num_cpus, 0.5);
  EXPECT_EQ(quota->file, "/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us");
}

// A container without a namespace of its own sees the host's path, but only its own folder.
TEST_F(CpuQuotaOf, AContainersFileSystemBeginsAtItsOwnGroup) {
  write("/proc/self/mountinfo",
        "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
  write("/proc/self/cgroup", "3:cpu:/docker/abc\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const auto quota = read();
  ASSERT_TRUE(quota);
  EXPECT_DOUBLE_EQ(quota->num_cpus, 2);
}

TEST_F(CpuQuotaOf, ASystemWithoutControlGroupsIsNone) { EXPECT_FALSE(read()); }

TEST_F(CpuQuotaOf, DamagedFilesAreNone) {
  write("/proc/self/mountinfo", "cgroup2\n" + std::string(kMountOfVersion2));
  write("/proc/self/cgroup", "nonsense\n0::/a\n");
  write("/sys/fs/cgroup/a/cpu.max", "many\n");
  EXPECT_FALSE(read());
}

TEST(ThreadsOfAQuota, AreTheNearestNumberAndAtLeastOne) {
  EXPECT_EQ(threads_of({0.1, ""}), 1);
  EXPECT_EQ(threads_of({1.25, ""}), 1);
  EXPECT_EQ(threads_of({1.5, ""}), 2);
  EXPECT_EQ(threads_of({8, ""}), 8);
  EXPECT_GT(threads_of({1e300, ""}), 1);
}

}  // namespace
}  // namespace headroom
