#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// What of a parameter is paged on its own.
enum class PageKind { kWeights, kGradients, kState };
inline constexpr std::size_t kNumPageKinds = 3;

/// Parameters that the same stages use, trained ones apart from frozen ones: they come and go
/// together.
struct PageUnit {
  std::string name;         ///< of the first stage that uses them
  std::vector<int> stages;  ///< all of them, from 0, in order
  std::array<std::int64_t, kNumPageKinds> bytes{};
  /// What the buffers through which the state can pass in pieces at an update, instead of being in
  /// memory as a whole, take at most above weights and gradients; 0: it cannot.
  std::int64_t stream_bytes = 0;

  std::int64_t bytes_of(PageKind kind) const { return bytes[static_cast<std::size_t>(kind)]; }
};

/// What a disk takes for a byte.
struct DiskSpeed {
  double read_ns_per_byte = 0;
  double write_ns_per_byte = 0;
  /// That a byte on its way takes from what computes meanwhile: a core is busy for it, and the
  /// threads on the others wait for that one.
  double taken_ns_per_byte = 0;
};

/// When the parameters of a unit are updated.
enum class UpdateTime {
  kAfterBackward,  ///< after that of the last micro-batch, one unit after the other
  kInBackward,     ///< as soon as its gradients are complete, where nothing needs all gradients
  kInNextForward,  ///< before the next update's first stage that uses it
};

/// Which weights, gradients and optimizer state live on disk while no stage uses them, and what
/// that costs one update.
struct PagingPlan {
  std::vector<PageUnit> units;                            ///< empty: everything is resident
  std::vector<std::array<bool, kNumPageKinds>> is_paged;  ///< by unit
  /// The next operation's pages come, and the last one's go, while an operation computes. Without
  /// it an update waits for every transfer, and needs the least memory.
  bool reads_ahead = false;
  UpdateTime updates = UpdateTime::kAfterBackward;
  std::vector<bool> streams_state;  ///< by unit: at an update its state passes in pieces
  std::int64_t bytes_read = 0;      ///< in one update
  std::int64_t bytes_written = 0;   ///< in one update
  std::int64_t disk_ns = 0;         ///< that the disk works in one update
  std::int64_t wait_ns = 0;         ///< that computing waits for it, or gives up a core for it

  bool is_active() const { return !units.empty(); }
  bool pages(std::size_t unit, PageKind kind) const {
    return is_paged[unit][static_cast<std::size_t>(kind)];
  }
  bool streams(std::size_t unit) const {
    return unit < streams_state.size() && streams_state[unit] && pages(unit, PageKind::kState);
  }
};

}  // namespace headroom
