#pragma once

// A test that runs its own program again, as ranks.

#include <headroom/comm/communicator.h>

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace headroom::testing {

/// Runs the disabled tests that match `filter` in `num_ranks` new processes of this program, each
/// with the environment variables of its rank and with `variables`, and waits for them. False when
/// one fails, or when they take longer than a minute: then they are ended.
inline bool run_as_ranks(std::int64_t num_ranks, const std::string& filter,
                         const std::vector<std::pair<std::string, std::string>>& variables) {
  const RendezvousStore place;
  std::vector<pid_t> children;
  bool all_well = true;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<std::string> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
    for (const auto& [name, value] : place.environment(rank, num_ranks).variables())
      environment.push_back(name + "=" + value);
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    std::vector<std::string> words = {"ranks", "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                                      "--gtest_filter=" + filter};
    std::vector<char*> word_pointers, environment_pointers;
    for (std::string& word : words) word_pointers.push_back(word.data());
    for (std::string& entry : environment) environment_pointers.push_back(entry.data());
    word_pointers.push_back(nullptr);
    environment_pointers.push_back(nullptr);
    pid_t child = -1;
    const std::string program = "/proc/" + std::to_string(::getpid()) + "/exe";
    if (::posix_spawn(&child, program.c_str(), nullptr, nullptr, word_pointers.data(),
                      environment_pointers.data()) != 0)
      all_well = false;
    if (child > 0) children.push_back(child);
  }
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!children.empty()) {
    const bool is_late = std::chrono::steady_clock::now() > limit;
    for (std::size_t i = 0; i < children.size();) {
      if (is_late) ::kill(children[i], SIGKILL);
      int status = 0;
      if (::waitpid(children[i], &status, is_late ? 0 : WNOHANG) != children[i]) {
        ++i;
        continue;
      }
      all_well = all_well && WIFEXITED(status) && WEXITSTATUS(status) == 0;
      children.erase(children.begin() + static_cast<std::ptrdiff_t>(i));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return all_well;
}

}  // namespace headroom::testing
