#pragma once

#include <string>

namespace headroom {

/// An output folder belongs to one run at a time. The lock is the system's: it ends with the
/// process, however that ends.
class RunLock {
 public:
  /// Throws ConfigError, with the other's process id, when another run writes to `output_dir`.
  /// Then removes what a run that was killed has left there.
  explicit RunLock(const std::string& output_dir);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace headroom
