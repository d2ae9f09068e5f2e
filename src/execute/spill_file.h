#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace headroom {

/// A file without a name, for bytes that come back before the process ends. Thread-safe.
class SpillFile {
 public:
  /// In `folder`; empty: the system's folder for temporary files. Throws ConfigError when that is
  /// not possible.
  explicit SpillFile(const std::string& folder);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// Returns where the bytes are. Throws BudgetError, with the numbers, when they cannot be
  /// written.
  std::int64_t write(const void* data, std::size_t num_bytes);
  /// Throws DataError when the bytes cannot be read back.
  void read(std::int64_t offset, void* data, std::size_t num_bytes) const;
  /// Gives the disk space back.
  void release(std::int64_t offset, std::size_t num_bytes) noexcept;

 private:
  std::string folder_;
  int descriptor_;
  std::mutex mutex_;
  std::int64_t end_ = 0;
};

}  // namespace headroom
