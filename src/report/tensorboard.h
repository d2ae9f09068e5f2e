#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace headroom {

/// Writes scalars to an event file that TensorBoard reads, each flushed as it is written. With an
/// empty folder it writes nothing.
class TensorBoardWriter {
 public:
  /// Makes events.out.tfevents.<time>.<process> in `folder`. Throws ConfigError when it cannot be
  /// written.
  explicit TensorBoardWriter(const std::string& folder);
  void add_scalar(const std::string& tag, double value, std::int64_t step);

 private:
  void write_record(const std::string& event);

  std::string path_;
  std::ofstream file_;
};

}  // namespace headroom
