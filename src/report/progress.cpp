#include "report/progress.h"
#include "core/output_file.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include "core/figures.h"
#include "core/input_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;

std::string clock_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::max(0.0, seconds));
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string bar(double share) {
  constexpr int kWidth = 20;
  const int filled = std::clamp(static_cast<int>(share * kWidth), 0, kWidth);
  return std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kWidth - filled), '.');
}

// A line that was cut short by a crash is no JSON, and is left out.
std::string lines_up_to(const std::string& path, std::int64_t last_step) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;
  std::string kept;
  if (last_step <= 0 || !path_exists(path)) return kept;
  std::istringstream lines(InputFile(path).read_all(kMostBytes));
  for (std::string line; std::getline(lines, line);) {
    if (!json_depth_is_allowed(line)) continue;
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
        json["step"] <= last_step)
      kept += line + "\n";
  }
  return kept;
}

}  // namespace

Progress::Progress(bool on)
    : on_(on),
      is_terminal_(isatty(STDERR_FILENO) != 0),
      started_(Clock::now()),
      last_drawn_(started_) {}

Progress::~Progress() { finish(); }

std::string Progress::line(const ProgressState& state) const {
  const double elapsed = std::chrono::duration<double>(Clock::now() - started_).count();
  const std::int64_t done = state.step - first_step_;
  const double left = done > 0 ? elapsed / static_cast<double>(done) *
                                     static_cast<double>(state.total_steps - state.step)
                               : 0.0;
  return fmt::format(
      "epoch {:.2f}  step {}/{}  loss {}  {} samples/s  memory {} (peak {})  left {}", state.epoch,
      state.step, state.total_steps, format_loss(state.loss),
      format_figure(state.samples_per_second), format_bytes(state.live_bytes),
      format_bytes(state.peak_bytes), clock_text(left));
}

void Progress::update(const ProgressState& state) {
  if (first_step_ < 0) first_step_ = state.step - 1;
  if (!on_ || !is_terminal_) return;
  const auto now = Clock::now();
  if (drawn_ && now - last_drawn_ < std::chrono::milliseconds(100)) return;
  last_drawn_ = now;
  drawn_ = true;
  const double share = state.total_steps > 0 ? static_cast<double>(state.step) /
                                                   static_cast<double>(state.total_steps)
                                             : 0.0;
  std::fprintf(stderr, "\r[%s] %s\033[K", bar(share).c_str(), line(state).c_str());
}

void Progress::log(const ProgressState& state) {
  if (!on_) return;
  finish();
  std::fprintf(stderr, "%s\n", line(state).c_str());
}

void Progress::finish() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
  drawn_ = false;
}

JsonLines::JsonLines(const std::string& path, std::int64_t last_step) : path_(path) {
  if (path.empty()) return;
  write_file_atomically(path, lines_up_to(path, last_step));
  file_.open(path, std::ios::app);
  if (!file_) throw ConfigError(fmt::format("cannot write '{}': {}", path, std::strerror(errno)));
}

void JsonLines::write(const Json& object) {
  if (path_.empty()) return;
  file_ << object.dump(-1) << '\n' << std::flush;
  if (!file_) throw ConfigError(fmt::format("cannot write '{}': {}", path_, std::strerror(errno)));
}

}  // namespace headroom
