#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

#include "report/json.h"

namespace headroom {

/// Where a run stands after an update.
struct ProgressState {
  double epoch = 0.0;
  std::int64_t step = 0;
  std::int64_t total_steps = 0;
  double loss = 0.0;
  double samples_per_second = 0.0;
  std::int64_t live_bytes = 0;
  std::int64_t peak_bytes = 0;
};

/// Shows a run on standard error: one line that is drawn over on a terminal, plain lines of what is
/// logged elsewhere.
class Progress {
 public:
  /// Off: shows nothing.
  explicit Progress(bool on);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Draws at most ten times a second on a terminal; elsewhere does nothing.
  void update(const ProgressState& state);
  /// Prints a line that stays.
  void log(const ProgressState& state);
  /// Clears what is drawn over.
  void finish();

 private:
  std::string line(const ProgressState& state) const;

  bool on_;
  bool is_terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point started_;
  std::chrono::steady_clock::time_point last_drawn_;
  std::int64_t first_step_ = -1;
};

/// A file of one JSON object per line, each flushed as it is written. With an empty path it writes
/// nothing.
class JsonLines {
 public:
  /// Of the lines that are there, keeps those whose "step" is at most `last_step`: a new run starts
  /// an empty file, a resumed one goes on from its snapshot. Throws ConfigError when the file
  /// cannot be written.
  explicit JsonLines(const std::string& path, std::int64_t last_step = 0);
  void write(const Json& object);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace headroom
