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

  std::int64_t bytes_of(PageKind kind) const { return bytes[static_cast<std::size_t>(kind)]; }
};

/// What a disk takes for a byte.
struct DiskSpeed {
  double read_ns_per_byte = 0;
  double write_ns_per_byte = 0;
};

/// Which weights, gradients and optimizer state live on disk while no stage uses them, and what
/// that costs one update.
struct PagingPlan {
  std::vector<PageUnit> units;                            ///< empty: everything is resident
  std::vector<std::array<bool, kNumPageKinds>> is_paged;  ///< by unit
  /// The next operation's pages come, and the last one's go, while an operation computes. Without
  /// it an update waits for every transfer, and needs the least memory.
  bool reads_ahead = false;
  std::int64_t bytes_read = 0;     ///< in one update
  std::int64_t bytes_written = 0;  ///< in one update
  std::int64_t disk_ns = 0;        ///< that the disk works in one update
  std::int64_t wait_ns = 0;        ///< that computing waits for it

  bool is_active() const { return !units.empty(); }
  bool pages(std::size_t unit, PageKind kind) const {
    return is_paged[unit][static_cast<std::size_t>(kind)];
  }
};

}  // namespace headroom
