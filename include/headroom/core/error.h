#pragma once

#include <stdexcept>
#include <string>

namespace headroom {

/// What the command-line program returns. The numbers are a promise to users.
enum class ExitCode : int {
  kDone = 0,
  kInternal = 1,
  kConfig = 2,
  kData = 3,
  kBudget = 4,
  kSnapshot = 5,
  kRankLost = 6,
  kInterrupted = 130,
};

/// Base of all errors that a user can cause or mend. The message gives the numbers and the remedy,
/// in one line.
class Error : public std::runtime_error {
 public:
  Error(ExitCode exit_code, const std::string& message)
      : std::runtime_error(message), exit_code_(exit_code) {}
  ExitCode exit_code() const noexcept { return exit_code_; }

 private:
  ExitCode exit_code_;
};

/// A flag, a configuration key or a combination of them that cannot be served.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message) : Error(ExitCode::kConfig, message) {}
};

/// A data file that is missing, truncated, corrupt or does not fit the model.
class DataError : public Error {
 public:
  explicit DataError(const std::string& message) : Error(ExitCode::kData, message) {}
};

/// The memory budget cannot be met.
class BudgetError : public Error {
 public:
  explicit BudgetError(const std::string& message) : Error(ExitCode::kBudget, message) {}
};

/// A snapshot that cannot be read, or does not belong to this run.
class SnapshotError : public Error {
 public:
  explicit SnapshotError(const std::string& message) : Error(ExitCode::kSnapshot, message) {}
};

/// A rank was lost, or the ranks disagree.
class CommError : public Error {
 public:
  explicit CommError(const std::string& message) : Error(ExitCode::kRankLost, message) {}
};

}  // namespace headroom
