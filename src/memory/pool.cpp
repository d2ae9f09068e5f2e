#include "memory/pool.h"

#include "memory/poison.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstdio>
#include <limits>

namespace headroom {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kPagesPerHugePage = kHugePageBytes / kPageBytes;
constexpr std::size_t kSmallestBlock = 2 * sizeof(Block);
constexpr std::size_t kBitsPerWord = 64;
// So many blocks of the right bin are looked at before a larger bin is taken: enough to find the
// block of a repeated size again.
constexpr int kMaxCandidates = 16;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

void* map_pages(std::size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

// From a multiple of a huge page on. No page of it is huge before somebody asks, also where the
// system would make all pages huge: those would be resident beyond the blocks that are touched.
void* map_arena(std::size_t bytes) {
  char* mapped = static_cast<char*>(map_pages(bytes + kHugePageBytes));
  if (!mapped) return nullptr;
  const std::size_t before =
      (kHugePageBytes - reinterpret_cast<std::uintptr_t>(mapped) % kHugePageBytes) % kHugePageBytes;
  char* begin = mapped + before;
  if (before > 0) ::munmap(mapped, before);
  ::munmap(begin + bytes, kHugePageBytes - before);
  ::madvise(begin, bytes, MADV_NOHUGEPAGE);
  return begin;
}

// Where address space is limited (ulimit -v), BLAS, threads and LibTorch need some of it too, and
// one that gets none may wait for it for ever: an arena takes no more than a part of what is left.
std::size_t most_to_reserve() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<std::size_t>::max();
  std::size_t used_pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%zu", &used_pages) != 1) used_pages = 0;
    std::fclose(file);
  }
  const std::size_t used = used_pages * kPageBytes;
  return limit.rlim_cur > used ? (limit.rlim_cur - used) / 4 : 0;
}

// The system grants more address space than it has memory. A block that memory and swap together
// cannot hold would be filled until the system ends some process, so it is refused at once.
bool can_ever_be_resident(std::size_t bytes) {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return true;
  return bytes <= (std::size_t{info.totalram} + std::size_t{info.totalswap}) * info.mem_unit;
}

// Bits [first, last) of the word that holds bit `first`.
std::uint64_t bits_between(std::size_t first, std::size_t last) {
  const std::size_t low = first % kBitsPerWord;
  const std::size_t count = std::min(last - first, kBitsPerWord - low);
  const std::uint64_t ones =
      count == kBitsPerWord ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  return ones << low;
}

}  // namespace

void ask_for_huge_pages(char* begin, char* end) {
  if (begin < end) ::madvise(begin, static_cast<std::size_t>(end - begin), MADV_HUGEPAGE);
}

Heap::Bin Heap::bin_of(std::size_t size) {
  const std::size_t magnitude = 63 - static_cast<std::size_t>(__builtin_clzll(size));
  return {magnitude, (size >> (magnitude - 5)) & (kNumSteps - 1)};
}

void Heap::link(Block* block) {
  const Bin bin = bin_of(block->size);
  Block*& head = bins_[bin.magnitude][bin.step];
  block->is_free = true;
  block->previous_free = nullptr;
  block->next_free = head;
  if (head) head->previous_free = block;
  head = block;
  steps_with_blocks_[bin.magnitude] |= std::uint32_t{1} << bin.step;
  magnitudes_with_blocks_ |= std::uint64_t{1} << bin.magnitude;
}

void Heap::unlink(Block* block) {
  if (block->next_free) block->next_free->previous_free = block->previous_free;
  if (block->previous_free) {
    block->previous_free->next_free = block->next_free;
  } else {
    const Bin bin = bin_of(block->size);
    bins_[bin.magnitude][bin.step] = block->next_free;
    if (!block->next_free) {
      steps_with_blocks_[bin.magnitude] &= ~(std::uint32_t{1} << bin.step);
      if (!steps_with_blocks_[bin.magnitude])
        magnitudes_with_blocks_ &= ~(std::uint64_t{1} << bin.magnitude);
    }
  }
  block->is_free = false;
}

// The smallest of the first candidates that is large enough; a block with resident pages is
// preferred to a clean one of equal size.
Block* Heap::fit_in(Block* candidates, std::size_t size) const {
  Block* best = nullptr;
  for (int i = 0; candidates && i < kMaxCandidates; ++i, candidates = candidates->next_free) {
    if (candidates->size == size && !candidates->is_clean) return candidates;
    if (candidates->size < size) continue;
    if (!best || candidates->size < best->size ||
        (candidates->size == best->size && best->is_clean))
      best = candidates;
  }
  return best;
}

Block* Heap::find(std::size_t size) {
  const Bin bin = bin_of(size);
  if (Block* block = fit_in(bins_[bin.magnitude][bin.step], size)) return block;
  // Every block of a later bin is large enough.
  const std::uint32_t later_steps =
      bin.step + 1 == kNumSteps
          ? 0
          : steps_with_blocks_[bin.magnitude] & (~std::uint32_t{0} << (bin.step + 1));
  if (later_steps)
    return fit_in(bins_[bin.magnitude][static_cast<std::size_t>(__builtin_ctz(later_steps))], size);
  const std::uint64_t later_magnitudes =
      magnitudes_with_blocks_ & (~std::uint64_t{0} << (bin.magnitude + 1));
  if (!later_magnitudes) return nullptr;
  const auto magnitude = static_cast<std::size_t>(__builtin_ctzll(later_magnitudes));
  return fit_in(
      bins_[magnitude][static_cast<std::size_t>(__builtin_ctz(steps_with_blocks_[magnitude]))],
      size);
}

bool Heap::reserve_arena(std::size_t at_least) {
  // Only address space is reserved here. Where that is limited, a smaller range has to do.
  at_least = round_up(at_least + 2 * alignment_, kPageBytes);
  if (!can_ever_be_resident(at_least)) return false;
  const std::size_t most = most_to_reserve();
  if (at_least / 3 > most) return false;  // one block may have three quarters of what is left
  std::size_t bytes = std::max(std::min(arena_bytes_, most / kPageBytes * kPageBytes), at_least);
  void* begin = map_arena(bytes);
  while (!begin && bytes > at_least) {
    bytes = std::max(bytes / 2 / kPageBytes * kPageBytes, at_least);
    begin = map_arena(bytes);
  }
  if (!begin) return false;
  void* bits = map_pages(round_up(bytes / kPageBytes / 8 + sizeof(std::uint64_t), kPageBytes));
  if (!bits) {
    ::munmap(begin, bytes);
    return false;
  }
  arenas_.push_back({static_cast<char*>(begin), static_cast<char*>(begin) + bytes,
                     static_cast<std::uint64_t*>(bits), 0});
  // The header is in front of the first multiple of the alignment, and room is left for the last.
  Block* block = ::new (static_cast<char*>(begin) + alignment_ - sizeof(Block)) Block{};
  block->size = bytes - alignment_;
  block->is_clean = true;
  Block* end = ::new (static_cast<void*>(block->after())) Block{};
  end->before = block;
  link(block);
  return true;
}

Heap::Arena& Heap::arena_of(const Block* block) {
  const char* address = reinterpret_cast<const char*>(block);
  return *std::find_if(arenas_.begin(), arenas_.end(), [&](const Arena& arena) {
    return address >= arena.begin && address < arena.end;
  });
}

// From its header to the header of the block after it. Huge pages are those that are all its own.
void Heap::mark_resident(const Block* block) {
  Arena& arena = arena_of(block);
  const auto offset = static_cast<std::size_t>(reinterpret_cast<const char*>(block) - arena.begin);
  const std::size_t last = (offset + block->size + sizeof(Block) - 1) / kPageBytes + 1;
  std::int64_t num_new = 0;
  for (std::size_t page = offset / kPageBytes; page < last;
       page = (page / kBitsPerWord + 1) * kBitsPerWord) {
    std::uint64_t& word = arena.resident_pages[page / kBitsPerWord];
    const std::uint64_t pages = bits_between(page, last);
    num_new += __builtin_popcountll(pages & ~word);
    word |= pages;
  }
  arena.num_touched = std::max(arena.num_touched, last);
  resident_bytes_ += num_new * static_cast<std::int64_t>(kPageBytes);
  if (num_new > 0)
    ask_for_huge_pages(arena.begin + round_up(offset, kHugePageBytes),
                       arena.begin + (offset + block->size) / kHugePageBytes * kHugePageBytes);
}

Block* Heap::allocate(std::size_t bytes) {
  if (bytes > (std::size_t{1} << (kNumMagnitudes - 2))) return nullptr;
  const std::size_t size =
      std::max(round_up(bytes + kGuardBytes + sizeof(Block), alignment_), kSmallestBlock);
  Block* block = find(size);
  if (!block) {
    if (!reserve_arena(size)) return nullptr;
    block = find(size);
  }
  unlink(block);
  if (block->size - size >= kSmallestBlock) {
    const std::size_t rest_size = block->size - size;
    block->size = size;
    unpoison(block->after(), sizeof(Block));
    Block* rest = ::new (static_cast<void*>(block->after())) Block{};
    rest->size = rest_size;
    rest->before = block;
    rest->is_clean = block->is_clean;
    rest->after()->before = rest;
    link(rest);
  }
  mark_resident(block);
  unpoison(block->data(), bytes);
  poison(static_cast<char*>(block->data()) + bytes, block->size - sizeof(Block) - bytes);
  return block;
}

void Heap::release(Block* block) {
  poison(block->data(), block->size - sizeof(Block));
  block->is_clean = false;
  Block* after = block->after();
  if (after->is_free) {
    unlink(after);
    block->size += after->size;
  }
  if (block->before && block->before->is_free) {
    Block* before = block->before;
    unlink(before);
    before->size += block->size;
    before->is_clean = false;
    block = before;
  }
  block->after()->before = block;
  link(block);
}

// Takes pages from the block's end, because allocations take from its start. A huge page goes as a
// whole: of one that is cut the system may keep the memory.
std::int64_t Heap::give_back_from(Block* block, std::int64_t bytes) {
  Arena& arena = arena_of(block);
  const auto offset = static_cast<std::size_t>(reinterpret_cast<char*>(block) - arena.begin);
  const std::size_t first = round_up(offset + sizeof(Block), kPageBytes) / kPageBytes;
  const std::size_t end = std::min((offset + block->size) / kPageBytes, arena.num_touched);
  std::int64_t num_given = 0;
  std::size_t begin = end;
  while (begin > first && (num_given * static_cast<std::int64_t>(kPageBytes) < bytes ||
                           begin % kPagesPerHugePage != 0)) {
    const std::size_t from = std::max(first, (begin - 1) / kBitsPerWord * kBitsPerWord);
    std::uint64_t& word = arena.resident_pages[from / kBitsPerWord];
    const std::uint64_t pages = bits_between(from, begin);
    num_given += __builtin_popcountll(word & pages);
    word &= ~pages;
    begin = from;
  }
  if (begin < end) {
    char* pages = arena.begin + begin * kPageBytes;
    const std::size_t length = (end - begin) * kPageBytes;
    ::madvise(pages, length, MADV_DONTNEED);
    ::madvise(pages, length, MADV_NOHUGEPAGE);
  }
  block->is_clean = begin <= first;
  resident_bytes_ -= num_given * static_cast<std::int64_t>(kPageBytes);
  return num_given * static_cast<std::int64_t>(kPageBytes);
}

void Heap::give_back(std::int64_t bytes) {
  // Left-over pieces between large blocks are the least likely to be used again, so they go first.
  for (std::size_t magnitude = 12; magnitude < kNumMagnitudes; ++magnitude) {
    if (!(magnitudes_with_blocks_ >> magnitude & 1)) continue;
    for (Block* block : bins_[magnitude]) {
      for (; block; block = block->next_free) {
        if (block->is_clean) continue;
        bytes -= give_back_from(block, bytes);
        if (bytes <= 0) return;
      }
    }
  }
}

Block* BlockPool::allocate(std::size_t bytes, std::int64_t live_bytes) {
  high_water_bytes_ = std::max(high_water_bytes_, live_bytes);
  Heap& heap = bytes <= kSmallBytes ? small_ : large_;
  const std::int64_t before = heap.resident_bytes();
  Block* block = heap.allocate(bytes);
  if (block && heap.resident_bytes() > before) keep_within_high_water();
  return block;
}

void BlockPool::keep_within_high_water() {
  constexpr std::int64_t kSlackBytes =
      std::int64_t{4} << 20;  // keeps tiny programs from giving back and asking again
  constexpr std::int64_t kAtLeastBytes = std::int64_t{1}
                                         << 20;  // a system call should be worth its while
  constexpr std::int64_t kMostUnused = std::int64_t{32} << 20;
  const std::int64_t allowed =
      high_water_bytes_ + std::min(high_water_bytes_ * 6 / 100, kMostUnused) + kSlackBytes;
  const std::int64_t resident = small_.resident_bytes() + large_.resident_bytes();
  if (resident > allowed) large_.give_back(std::max(resident - allowed, kAtLeastBytes));
}

void BlockPool::release(Block* block) {
  // By the request, as in allocate().
  (block->requested_bytes <= static_cast<std::int64_t>(kSmallBytes) ? small_ : large_)
      .release(block);
}

void BlockPool::trim(std::int64_t live_bytes) {
  constexpr std::int64_t kAll = std::int64_t{1} << 62;
  small_.give_back(kAll);
  large_.give_back(kAll);
  high_water_bytes_ = live_bytes;
}

}  // namespace headroom
