#include "launch.h"

#include <headroom/comm/communicator.h>
#include <headroom/core/error.h>

#include <fmt/format.h>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace{
    15};  // between asking the ranks that are left to end, and ending them

// The words of this program's command line.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

std::vector<std::string> environment_with(const RankEnvironment& rank) {
  std::vector<std::string> result;
  const auto variables = rank.variables();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    const bool is_replaced = std::any_of(variables.begin(), variables.end(),
                                         [&](const auto& item) { return item.first == name; });
    if (!is_replaced && name != "TORCHELASTIC_RESTART_COUNT") result.push_back(text);
  }
  for (const auto& [name, value] : variables) result.push_back(fmt::format("{}={}", name, value));
  return result;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// Signals that this process waits for instead of being interrupted by them.
sigset_t awaited_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

class Ranks {
 public:
  Ranks(std::int64_t num_ranks, const sigset_t& mask_of_ranks) {
    std::vector<std::string> words = own_words();
    const std::vector<char*> word_pointers = pointers_to(words);
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<std::string> variables = environment_with(place_.environment(rank, num_ranks));
      const std::vector<char*> variable_pointers = pointers_to(variables);
      const pid_t parent = ::getpid();
      const pid_t child = ::fork();
      if (child == 0) {
        // Only calls that are allowed between fork and exec. A rank whose starter is gone stops as
        // by SIGTERM.
        ::prctl(PR_SET_PDEATHSIG, SIGTERM);
        // A terminal sends Ctrl-C to the whole group of this process, which passes it on: a rank
        // shall hear of it once.
        ::setpgid(0, 0);
        if (::getppid() != parent) ::_exit(static_cast<int>(ExitCode::kRankLost));
        ::sigprocmask(SIG_SETMASK, &mask_of_ranks, nullptr);
        ::execve("/proc/self/exe", word_pointers.data(), variable_pointers.data());
        ::_exit(127);
      }
      if (child < 0) {
        end_all(SIGKILL);
        throw CommError(
            fmt::format("rank {} of {} cannot be started: no process is left", rank, num_ranks));
      }
      children_.push_back({child, std::nullopt});
    }
  }

  void reap() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      int status = 0;
      if (children_[rank].status ||
          ::waitpid(children_[rank].process, &status, WNOHANG) != children_[rank].process)
        continue;
      children_[rank].status = status;
      if (!failed_at_ && !ended_well(status)) failed_at_ = Clock::now();
      if (WIFSIGNALED(status)) {
        fmt::print(stderr, "headroom: rank {} of {} was killed by signal {}\n", rank,
                   children_.size(), WTERMSIG(status));
      }
    }
  }

  bool are_running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return !child.status; });
  }

  void end_all(int signal) const {
    send_all(signal);
    send_all(SIGCONT);  // one that stands still would not hear of it
  }

  // Ranks that do not notice by themselves that another failed, because they have not met it yet or
  // are stuck. One that stood still notices as soon as it goes on.
  void terminate_stragglers() {
    if (!failed_at_) return;
    const auto waited = Clock::now() - *failed_at_;
    if (!was_woken_) {
      was_woken_ = true;
      send_all(SIGCONT);
    }
    if (waited > 2 * kGrace) return end_all(SIGKILL);
    if (waited > kGrace && !was_asked_) {
      was_asked_ = true;
      end_all(SIGTERM);
    }
  }

  // A rank that a signal ended after somebody had asked to stop was interrupted, not lost.
  int exit_code(bool was_asked_to_stop) const {
    constexpr int kLost = static_cast<int>(ExitCode::kRankLost),
                  kInterrupted = static_cast<int>(ExitCode::kInterrupted);
    int result = static_cast<int>(ExitCode::kDone);
    for (const Child& child : children_) {
      int code = WIFEXITED(*child.status) ? WEXITSTATUS(*child.status) : kLost;
      if (code == kLost && was_asked_to_stop) code = kInterrupted;
      const bool is_cause = code != 0 && code != kLost && code != kInterrupted;
      if (is_cause) return code;
      if (code == kLost || (code == kInterrupted && result == 0)) result = code;
    }
    return result;
  }

 private:
  struct Child {
    pid_t process;
    std::optional<int> status;  // once it has ended
  };

  void send_all(int signal) const {
    for (const Child& child : children_) {
      if (!child.status) ::kill(child.process, signal);
    }
  }

  static bool ended_well(int status) {
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 ||
                                 WEXITSTATUS(status) == static_cast<int>(ExitCode::kInterrupted));
  }

  RendezvousStore place_;
  std::vector<Child> children_;
  std::optional<Clock::time_point> failed_at_;
  bool was_woken_ = false;
  bool was_asked_ = false;
};

}  // namespace

int launch_ranks(std::int64_t num_ranks) {
  const sigset_t awaited = awaited_signals();
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &awaited, &before);  // also for the threads of the rendezvous
  Ranks ranks(num_ranks, before);
  int num_requests = 0;
  while (ranks.are_running()) {
    const timespec moment{0, 200'000'000};
    const int signal = ::sigtimedwait(&awaited, nullptr, &moment);
    if (signal > 0 && signal != SIGCHLD) ranks.end_all(++num_requests <= 2 ? SIGTERM : SIGKILL);
    ranks.reap();
    ranks.terminate_stragglers();
  }
  return ranks.exit_code(num_requests > 0);
}

}  // namespace headroom
