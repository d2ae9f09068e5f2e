#pragma once

// Runs the built command-line program.

#include "support/build_paths.h"
#include "support/idx_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace headroom::testing {

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
  std::int64_t peak_resident_bytes = 0;
};

/// A run of `headroom` with these arguments and environment variables, in `folder`. `prepare` is
/// called in its process before it starts.
class Program {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  Program(const std::vector<std::string>& arguments, const TemporaryFolder& folder,
          const Variables& variables = {}, const std::function<void()>& prepare = {})
      : out_(streams_ / "out"), err_(streams_ / "err") {
    std::vector<std::string> words = arguments;
    words.insert(words.begin(), std::string(HEADROOM_BINARY_DIR) + "/bin/headroom");
    std::vector<char*> raw;
    for (std::string& word : words) raw.push_back(word.data());
    raw.push_back(nullptr);
    child_ = ::fork();
    if (child_ == 0) {
      const int out = ::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      const int err = ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      if (out < 0 || err < 0 || ::chdir(folder.path().c_str()) != 0) ::_exit(126);
      ::setenv("OMP_NUM_THREADS", "1",
               1);  // small models: more threads would only wait for each other on a busy machine
      for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
      ::dup2(out, STDOUT_FILENO);
      ::dup2(err, STDERR_FILENO);
      // Also where the tests themselves were started with nohup or in the background.
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
      if (prepare) prepare();
      ::execv(raw[0], raw.data());
      ::_exit(127);
    }
  }

  /// Sends the signal as soon as `ready` is true. Returns false when the program ended, or a minute
  /// passed, before.
  bool interrupt_when(int signal, const std::function<bool()>& ready) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!ready()) {
      siginfo_t info{};
      const bool ended =
          ::waitid(P_PID, static_cast<id_t>(child_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid != 0;
      if (ended || std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return ::kill(child_, signal) == 0;
  }

  pid_t process() const { return child_; }

  Outcome wait() const {
    int status = 0;
    rusage usage{};
    ::wait4(child_, &status, 0, &usage);
    Outcome outcome;
    outcome.peak_resident_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    outcome.out = read_file(out_);
    outcome.err = read_file(err_);
    return outcome;
  }

 private:
  TemporaryFolder streams_;
  std::string out_;
  std::string err_;
  pid_t child_ = -1;
};

inline Outcome run_program(const std::vector<std::string>& arguments,
                           const TemporaryFolder& folder) {
  return Program(arguments, folder).wait();
}

/// The process of a rank of a run with this output folder, told by its environment; -1: there is
/// none.
inline pid_t rank_process(int rank, const std::string& output_dir) {
  const std::string variable =
      std::string("\0RANK=", 6) + std::to_string(rank) + std::string("\0", 1);
  const std::string word = output_dir + std::string("\0", 1);
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    try {
      if (read_file(entry.path() / "environ").find(variable) != std::string::npos &&
          read_file(entry.path() / "cmdline").find(word) != std::string::npos)
        return std::stoi(name);
    } catch (const std::exception&) {
      continue;  // it has ended, or is not ours
    }
  }
  return -1;
}

}  // namespace headroom::testing
