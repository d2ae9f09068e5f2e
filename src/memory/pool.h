#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/device.h"

namespace headroom {

/// What a disk reads and writes without a copy begins at a multiple of this: a sector. Tensors of
/// more than 32 KiB do.
inline constexpr std::size_t kTransferAlignment = 512;

/// The inside of a block of some MiB is on pages of this size, where the system has them. To be
/// touched for the first time costs a page of 4 KiB a microsecond, and a huge one hardly more than
/// its zeros; a disk is given a huge page as one piece.
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

/// Asks for huge pages where the range, which begins and ends on pages, has room for whole ones.
/// Where the system has none, nothing changes.
void ask_for_huge_pages(char* begin, char* end);

/// The 64 bytes in front of every block's data. Blocks lie side by side; a free block also sits in
/// the list of its size bin.
struct alignas(64) Block : BlockRecord {
  /// Of the whole block, header included; a multiple of the heap's alignment; 0 marks the end of an
  /// arena.
  std::size_t size;
  Block* before;  ///< the block that ends where this one starts; null for the first of an arena
  Block* next_free;
  Block* previous_free;
  bool is_free;
  bool is_clean;  ///< free, and no page inside is resident (the header's own page aside)

  void* data() { return this + 1; }
  Block* after() { return reinterpret_cast<Block*>(reinterpret_cast<char*>(this) + size); }
  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
};
static_assert(sizeof(Block) == 64,
              "a block's data is aligned to 64 bytes because its header is 64 bytes");

/// Blocks carved out of large reserved address ranges: best fit by size bins, split on allocation,
/// merged on release, all in constant time. Data is aligned to `alignment`, a multiple of 64 that
/// divides a page. It knows which pages were handed out and so may be resident. Not thread-safe.
class Heap {
 public:
  explicit Heap(std::size_t arena_bytes, std::size_t alignment = sizeof(Block))
      : arena_bytes_(arena_bytes), alignment_(alignment) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// A block for `bytes` > 0 of data; null when the system refuses the address space.
  Block* allocate(std::size_t bytes);
  void release(Block* block);
  /// Gives pages inside free blocks back to the system, small blocks first, until at least `bytes`
  /// were given back or none is left.
  void give_back(std::int64_t bytes);
  std::int64_t resident_bytes() const { return resident_bytes_; }

 private:
  static constexpr std::size_t kNumMagnitudes =
      48;  // a bin's magnitude is the floor of log2 of its sizes ...
  static constexpr std::size_t kNumSteps = 32;  // ... which is cut into 32 steps

  struct Bin {
    std::size_t magnitude;
    std::size_t step;
  };
  struct Arena {
    char* begin;
    char* end;
    std::uint64_t* resident_pages;  ///< one bit per page
    std::size_t num_touched;        ///< pages from this one on were never handed out
  };

  static Bin bin_of(std::size_t size);
  void link(Block* block);
  void unlink(Block* block);
  Block* find(std::size_t size);
  Block* fit_in(Block* candidates, std::size_t size) const;
  bool reserve_arena(std::size_t at_least);
  Arena& arena_of(const Block* block);
  void mark_resident(const Block* block);
  std::int64_t give_back_from(Block* block, std::int64_t bytes);

  std::size_t arena_bytes_;
  std::size_t alignment_;
  std::int64_t resident_bytes_ = 0;
  std::vector<Arena> arenas_;
  std::uint64_t magnitudes_with_blocks_ = 0;
  std::array<std::uint32_t, kNumMagnitudes> steps_with_blocks_{};
  std::array<std::array<Block*, kNumSteps>, kNumMagnitudes> bins_{};
};

/// Pools freed blocks so that resident memory follows the live bytes' high-water mark: pages of
/// free blocks go back to the system before the pool would hold more than 6%, or 32 MiB, beyond
/// that mark. Not thread-safe.
class BlockPool {
 public:
  /// Null when the system is out of memory. `live_bytes` is what callers hold, this request
  /// included.
  Block* allocate(std::size_t bytes, std::int64_t live_bytes);
  void release(Block* block);
  /// Gives all free pages back, and starts the high-water mark anew from `live_bytes`.
  void trim(std::int64_t live_bytes);

 private:
  void keep_within_high_water();

  // Small blocks often live long; apart from the large ones they cannot keep those from merging.
  static constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
  Heap small_{std::size_t{1} << 30};
  Heap large_{std::size_t{64} << 30, kTransferAlignment};
  std::int64_t high_water_bytes_ = 0;
};

}  // namespace headroom
