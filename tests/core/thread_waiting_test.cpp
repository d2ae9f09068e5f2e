#include "core/thread_waiting.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "core/contention.h"
#include "core/idle_team.h"

namespace headroom {
namespace {

using Duration = ContentionPolicy::Duration;

constexpr Duration kWindow{0.05};
constexpr Duration kFree{0.001};
constexpr Duration kBusy{0.02};

// Windows until the answer is `sleeps`; the machine is busy when threads spin, and nothing is to be
// learnt while they sleep.
int windows_until(ContentionPolicy& policy, bool sleeps, Duration delay) {
  int count = 1;
  while (policy.should_sleep(delay, kWindow) != sleeps) ++count;
  return count;
}

TEST(ContentionPolicy, SpinsOnAFreeMachine) {
  ContentionPolicy policy;
  for (int window = 0; window < 1000; ++window)
    ASSERT_FALSE(policy.should_sleep(kFree, kWindow)) << window;
}

TEST(ContentionPolicy, SleepsAtTheFirstBusyWindowAndTriesAgainAfterASecond) {
  ContentionPolicy policy;
  EXPECT_TRUE(policy.should_sleep(kBusy, kWindow));
  EXPECT_NEAR(windows_until(policy, false, kFree), 20, 1);
}

TEST(ContentionPolicy, TriesLessAndLessOftenWhileTheMachineStaysBusy) {
  ContentionPolicy policy;
  int expected = 20;
  for (int trial = 0; trial < 8; ++trial) {
    EXPECT_EQ(windows_until(policy, true, kBusy), 1);
    EXPECT_NEAR(windows_until(policy, false, kBusy), expected, 1) << trial;
    expected = std::min(2 * expected, 320);
  }
}

TEST(ContentionPolicy, ForgetsABusyTimeThatHasEnded) {
  ContentionPolicy policy;
  for (int trial = 0; trial < 4; ++trial) {
    windows_until(policy, true, kBusy);
    windows_until(policy, false, kBusy);
  }
  for (int window = 0; window < 40; ++window) policy.should_sleep(kFree, kWindow);
  windows_until(policy, true, kBusy);
  EXPECT_NEAR(windows_until(policy, false, kFree), 20, 1);
}

std::int64_t sleeps_of_this_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

// Times that the thread which began the loops slept at their ends, where the other one was 2 ms
// late: less than GNU's runtime spins by itself.
std::int64_t sleeps_in_loops(int num_loops) {
  const std::int64_t before = sleeps_of_this_thread();
  for (int loop = 0; loop < num_loops; ++loop) {
#pragma omp parallel for num_threads(2) schedule(static, 1)
    for (int thread = 0; thread < 2; ++thread)
      if (thread == 1) usleep(2000);
  }
  return sleeps_of_this_thread() - before;
}

TEST(IdleTeam, LetsThreadsSleepWhileTheyWait) {
  constexpr int kLoops = 30;
  sleeps_in_loops(1);  // starts the threads
  const IdleTeam team;
  EXPECT_GE(sleeps_in_loops(kLoops), kLoops * 2 / 3);
}

TEST(IdleTeam, ComesAndGoes) {
  for (int i = 0; i < 20; ++i) const IdleTeam team;
}

TEST(ThreadWaiting, IsTheUsersWhereTheUserDecides) {
  std::optional<std::string> before;
  if (const char* value = std::getenv("OMP_WAIT_POLICY")) before = value;
  setenv("OMP_WAIT_POLICY", "active", 1);
  EXPECT_EQ(thread_waiting(), "OMP_WAIT_POLICY=active");
  before ? setenv("OMP_WAIT_POLICY", before->c_str(), 1) : unsetenv("OMP_WAIT_POLICY");
}

TEST(ThreadWaiting, MayBeAskedForAgainAndAgain) {
  adapt_thread_waiting();
  adapt_thread_waiting();
  EXPECT_FALSE(thread_waiting().empty());
}

}  // namespace
}  // namespace headroom
