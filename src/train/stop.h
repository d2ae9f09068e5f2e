#pragma once

// A run that is asked to end early: the one rule for whoever looks.
//   - A request is a flag that a signal handler or another thread sets at any time, also before a
//     run starts. It belongs to the run that is under way, or to the next one, and is forgotten
//     when that run is over.
//   - Long work calls throw_if_stopped() between its pieces: operations of a micro-batch, stages
//     that are measured, schedules that are solved, batches that are evaluated. A snapshot that is
//     being written is finished first.
//   - Stopped unwinds to the last state that can be continued, and the trainer saves that.

#include <exception>

namespace headroom {

class Stopped : public std::exception {
 public:
  const char* what() const noexcept override { return "the run was asked to stop"; }
};

/// Safe in a signal handler.
void request_stop() noexcept;
bool stop_is_requested() noexcept;
/// Throws Stopped when a stop was requested.
void throw_if_stopped();

/// Spans a run: at its end a request is forgotten.
class StopScope {
 public:
  StopScope() = default;
  ~StopScope();
  StopScope(const StopScope&) = delete;
  StopScope& operator=(const StopScope&) = delete;
};

}  // namespace headroom
