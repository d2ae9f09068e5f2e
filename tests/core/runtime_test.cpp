#include <headroom/core/runtime.h>

#include <headroom/core/error.h>
#include <headroom/core/version.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/cpu_quota.h"

namespace headroom {
namespace {

class Threads : public ::testing::Test {
 protected:
  Threads() {
    if (const char* text = std::getenv("OMP_NUM_THREADS")) environment_ = text;
    unsetenv("OMP_NUM_THREADS");
  }
  ~Threads() override {
    environment_ ? setenv("OMP_NUM_THREADS", environment_->c_str(), 1)
                 : unsetenv("OMP_NUM_THREADS");
    configure_threads(0);
  }

 private:
  std::optional<std::string> environment_;
};

// Cores that this process may run on, or what its control group may use of them.
int available_cpus() {
  const auto quota = cpu_quota();
  const int cores = runtime_info().num_cores;
  return quota ? std::min(cores, threads_of(*quota)) : cores;
}

TEST_F(Threads, SayWhyTheyAreThatMany) {
  configure_threads(3);
  EXPECT_EQ(runtime_info().num_threads_reason, "as asked for");
  setenv("OMP_NUM_THREADS", "5", 1);
  configure_threads(0);
  EXPECT_EQ(runtime_info().num_threads_reason, "OMP_NUM_THREADS=5");
}

TEST_F(Threads, AreWhatWasAskedFor) {
  configure_threads(1);
  EXPECT_EQ(at::get_num_threads(), 1);
  configure_threads(3);
  EXPECT_EQ(at::get_num_threads(), 3);
}

TEST_F(Threads, FollowTheEnvironmentAndThenTheCores) {
  setenv("OMP_NUM_THREADS", "5", 1);
  configure_threads(0);
  EXPECT_EQ(at::get_num_threads(), 5);
  configure_threads(1);
  EXPECT_EQ(at::get_num_threads(), 1) << "a request is stronger than the environment";
  unsetenv("OMP_NUM_THREADS");
  configure_threads(0);
  EXPECT_EQ(at::get_num_threads(), available_cpus());
}

TEST_F(Threads, ProcessesShareTheCores) {
  ::unsetenv("OMP_NUM_THREADS");
  configure_threads(0, 2);
  EXPECT_EQ(at::get_num_threads(), std::max(1, available_cpus() / 2));
  configure_threads(0, 1000);
  EXPECT_EQ(at::get_num_threads(), 1);
  configure_threads(3, 2);
  EXPECT_EQ(at::get_num_threads(), 3) << "a number that was asked for is each process's own";
}

TEST_F(Threads, ANegativeNumberIsRefused) { EXPECT_THROW(configure_threads(-1), ConfigError); }

TEST_F(Threads, MoreThanCoresIsWarnedAboutWithTheRemedy) {
  configure_threads(0);
  const std::size_t before = runtime_info().warnings.size();
  configure_threads(runtime_info().num_cores + 1);
  const auto warnings = runtime_info().warnings;
  ASSERT_EQ(warnings.size(), before + 1);
  EXPECT_NE(warnings.back().find("--num_threads"), std::string::npos);
}

TEST(RuntimeInfo, SaysWhatTheProcessRunsOn) {
  const RuntimeInfo info = runtime_info();
  EXPECT_EQ(info.headroom_version, kVersion);
  EXPECT_FALSE(info.libtorch_version.empty());
  EXPECT_GE(info.num_cores, 1);
  EXPECT_EQ(info.num_threads, at::get_num_threads());
  EXPECT_FALSE(info.thread_waiting.empty());
}

TEST(RuntimeInfo, TheBlasThatRunsSharesTheThreadsOfLibTorch) {
  const RuntimeInfo info = runtime_info();
  EXPECT_TRUE(info.blas_is_openmp) << info.blas;
  EXPECT_NE(info.blas.find("OpenMP"), std::string::npos) << info.blas;
}

}  // namespace
}  // namespace headroom
