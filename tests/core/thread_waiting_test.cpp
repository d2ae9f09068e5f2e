#include "core/thread_waiting.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/contention.h"
#include "core/gathered_threads.h"
#include "core/idle_team.h"

namespace headroom {
namespace {

using Duration = ContentionWindow::Duration;

constexpr Duration kLength{0.05};
constexpr Duration kFree{0.001};
constexpr Duration kBusy{0.02};

ContentionWindow window_of(Duration lost, double cores_of_others = 0, double idle_left = 0) {
  return {kLength, lost, cores_of_others, idle_left};
}

// A policy for threads that never gather: the eight of a machine whose other work takes one core.
ContentionPolicy policy_of_eight() { return {8, 8}; }

// Windows until the answer is `sleeps`; the machine is busy when threads spin, and nothing is to be
// learnt while they sleep.
int windows_until(ContentionPolicy& policy, bool sleeps, Duration lost) {
  int count = 1;
  while (policy.decide(window_of(lost, 1.0)).sleeps != sleeps) ++count;
  return count;
}

TEST(ContentionPolicy, SpinsOnAFreeMachine) {
  ContentionPolicy policy = policy_of_eight();
  for (int window = 0; window < 1000; ++window)
    ASSERT_FALSE(policy.decide(window_of(kFree)).sleeps) << window;
}

TEST(ContentionPolicy, DoesNotMindShortWorkOfTheSystem) {
  ContentionPolicy policy = policy_of_eight();
  for (int window = 0; window < 1000; ++window)
    ASSERT_FALSE(policy.decide(window_of(window % 10 == 0 ? Duration(0.011) : kFree)).sleeps)
        << window;
}

TEST(ContentionPolicy, SleepsWhereALittleIsLostAllTheTime) {
  ContentionPolicy policy = policy_of_eight();
  int count = 1;
  while (!policy.decide(window_of(Duration(0.007))).sleeps && count < 100) ++count;
  EXPECT_NEAR(count, 10, 1);
}

TEST(ContentionPolicy, SleepsAtTheSecondBusyWindowAndTriesAgainAfterASecond) {
  ContentionPolicy policy = policy_of_eight();
  EXPECT_FALSE(policy.decide(window_of(kBusy)).sleeps);
  EXPECT_TRUE(policy.decide(window_of(kBusy)).sleeps);
  EXPECT_NEAR(windows_until(policy, false, kFree), 20, 5);
}

TEST(ContentionPolicy, TriesLessAndLessOftenWhileTheMachineStaysBusy) {
  ContentionPolicy policy = policy_of_eight();
  int expected = 20;
  for (int trial = 0; trial < 8; ++trial) {
    EXPECT_EQ(windows_until(policy, true, kBusy), 2);
    EXPECT_NEAR(windows_until(policy, false, kBusy), expected, 5) << trial;
    expected = std::min(2 * expected, 320);
  }
}

TEST(ContentionPolicy, ForgetsABusyTimeThatHasEnded) {
  ContentionPolicy policy = policy_of_eight();
  for (int trial = 0; trial < 4; ++trial) {
    windows_until(policy, true, kBusy);
    windows_until(policy, false, kBusy);
  }
  for (int window = 0; window < 40; ++window) policy.decide(window_of(kFree));
  windows_until(policy, true, kBusy);
  EXPECT_NEAR(windows_until(policy, false, kFree), 20, 5);
}

TEST(ContentionPolicy, GathersOnTheCoresThatOthersLeave) {
  struct Case {
    int num_threads, num_cores;
    double cores_of_others;
    int gathered;
  };
  for (const Case& c : std::vector<Case>{{2, 2, 0.5, 1},   // one neighbour
                                         {2, 2, 1.1, 1},   // one for each core
                                         {2, 2, 0.25, 0},  // one of low priority
                                         {1, 2, 1.5, 0},   // nobody to gather with
                                         {8, 8, 1.0, 0},   // most cores are free
                                         {8, 8, 4.2, 4},
                                         {8, 8, 8.0, 1},
                                         {2, 16, 12.0, 0}}) {
    ContentionPolicy policy(c.num_threads, c.num_cores);
    policy.decide(window_of(kBusy, 0.1));  // in which the others began
    const ThreadConduct conduct = policy.decide(window_of(kBusy, c.cores_of_others));
    EXPECT_TRUE(conduct.sleeps);
    EXPECT_EQ(conduct.num_cores, c.gathered) << c.num_threads << " " << c.cores_of_others;
  }
}

TEST(ContentionPolicy, DoesNotGatherForWhatRunsWhileThreadsSleep) {
  ContentionPolicy policy(2, 2);
  ThreadConduct conduct;
  for (int window = 0; window < 200; ++window) {
    conduct = policy.decide(conduct.sleeps ? window_of(kFree, 1.0) : window_of(kBusy, 0.2));
    ASSERT_EQ(conduct.num_cores, 0) << window;
  }
}

TEST(ContentionPolicy, StaysGatheredUntilTheCoresThatItLeftAreIdle) {
  ContentionPolicy policy(2, 2);
  for (int window = 0; window < 2; ++window) policy.decide(window_of(kBusy, 0.6));
  for (int window = 0; window < 2000; ++window)
    ASSERT_EQ(policy.decide(window_of(kFree, 1.0, 0.1)).num_cores, 1) << window;
  int count = 1;
  while (policy.decide(window_of(kFree, 0.0, 0.95)).sleeps && count < 100) ++count;
  EXPECT_LE(count, 20);
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

std::vector<int> cores_of(pid_t thread) {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(thread, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

// A thread that waits until it is told to end, and its number.
class WaitingThread {
 public:
  WaitingThread()
      : thread_([this] {
          id_.set_value(static_cast<pid_t>(syscall(SYS_gettid)));
          end_.get_future().wait();
        }) {
    id = id_.get_future().get();
  }
  ~WaitingThread() {
    end_.set_value();
    thread_.join();
  }
  pid_t id = 0;

 private:
  std::promise<pid_t> id_;
  std::promise<void> end_;
  std::thread thread_;
};

void set_cores(pid_t thread, const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  sched_setaffinity(thread, sizeof(set), &set);
}

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

void gather_and_part() {
  std::vector<int> any(CPU_SETSIZE);
  std::iota(any.begin(), any.end(), 0);
  set_cores(0, any);  // as many as the system allows
  const std::vector<int> all = allowed_cores();
  const std::vector<int> last = {all.back()}, first = {all.front()};
  const WaitingThread free, pinned;
  if (all.size() > 1) set_cores(pinned.id, first);
  {
    const GatheredThreads gathered(last, all);
    check(gathered.cores() == last, "it says where threads are");
    check(cores_of(free.id) == last, "a free thread moves");
    check(cores_of(pinned.id) == first, "a pinned one stays");
    check(allowed_cores() == all, "the maker stays");
  }
  check(cores_of(free.id) == all, "a free thread comes back");
  check(cores_of(pinned.id) == first, "a pinned one stays pinned");
  std::exit(0);
}

// In a process of its own: in this one, tests may have started the watch, which moves threads too.
TEST(GatheredThreads, MovesAllButItsMakerAndThoseThatArePinned) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(gather_and_part(), ::testing::ExitedWithCode(0), "");
}

TEST(ThreadWaiting, IsTheUsersWhereTheUserDecides) {
  std::optional<std::string> before;
  if (const char* value = std::getenv("OMP_WAIT_POLICY")) before = value;
  setenv("OMP_WAIT_POLICY", "active", 1);
  EXPECT_EQ(thread_waiting(), "OMP_WAIT_POLICY=active");
  before ? setenv("OMP_WAIT_POLICY", before->c_str(), 1) : unsetenv("OMP_WAIT_POLICY");
}

TEST(ThreadWaiting, MayBeAskedForAgainAndAgain) {
  adapt_thread_waiting(2);
  adapt_thread_waiting(2);
  EXPECT_FALSE(thread_waiting().empty());
}

}  // namespace
}  // namespace headroom
