// What the pool takes from the system beside the budget.
#include "memory/pool.h"
#include "memory/poison.h"

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace headroom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t address_space_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

// Calls `check` in a process that may take `left_bytes` of address space more than it has.
template <typename Check>
int exit_code_with(std::size_t left_bytes, const Check& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    const std::size_t most = address_space_bytes() + left_bytes;
    const rlimit limit{most, most};
    ::_exit(::setrlimit(RLIMIT_AS, &limit) == 0 ? check() : 100);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 101;
}

// A range of addresses as the system sees it.
struct MappedRange {
  std::uintptr_t begin = 0, end = 0;
  std::size_t resident_bytes = 0;
  std::string flags;  // two letters each
};

std::vector<MappedRange> mapped_ranges() {
  std::vector<MappedRange> ranges;
  std::ifstream file("/proc/self/smaps");
  for (std::string line; std::getline(file, line);) {
    unsigned long begin = 0, end = 0, kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      ranges.push_back({begin, end, 0, {}});
    } else if (std::sscanf(line.c_str(), "Rss: %lu kB", &kilobytes) == 1) {
      ranges.back().resident_bytes = kilobytes << 10;
    } else if (line.rfind("VmFlags:", 0) == 0) {
      ranges.back().flags = line.substr(8) + " ";
    }
  }
  return ranges;
}

bool is_on_huge_pages(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (const MappedRange& range : mapped_ranges()) {
    if (range.begin <= address && address < range.end)
      return range.flags.find(" hg ") != std::string::npos;
  }
  return false;
}

// Touches all of it, as tensors do.
Block* filled(Block* block, std::size_t bytes) {
  std::memset(block->data(), 1, bytes);
  return block;
}

TEST(Pool, TheInsideOfALargeBlockIsOnHugePages) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"))
    GTEST_SKIP() << "this system has no huge pages";
  Heap heap(256 * kMiB, kTransferAlignment);
  const auto inside = [](Block* block) { return static_cast<char*>(block->data()) + 4 * kMiB; };
  Block* first = filled(heap.allocate(16 * kMiB), 16 * kMiB);
  Block* small = filled(heap.allocate(kMiB), kMiB);
  EXPECT_TRUE(is_on_huge_pages(inside(first)));
  EXPECT_FALSE(is_on_huge_pages(small->data()));
  // Given back, it has pages of any block again.
  heap.release(first);
  EXPECT_TRUE(is_on_huge_pages(inside(first)));
  heap.give_back(64 * static_cast<std::int64_t>(kMiB));
  EXPECT_FALSE(is_on_huge_pages(inside(first)));
  EXPECT_TRUE(is_on_huge_pages(inside(heap.allocate(16 * kMiB))));
}

// Huge pages must not bring memory that nobody counts, whatever the system does by itself.
TEST(Pool, NoMoreIsResidentThanIsCounted) {
  Heap heap(512 * kMiB, kTransferAlignment);
  std::minstd_rand random(1);
  std::vector<Block*> blocks;
  Block* first = nullptr;
  std::int64_t live_bytes = 0;
  for (int i = 0; i < 600; ++i) {
    if (blocks.size() < 12 && random() % 3 != 0) {
      const std::size_t bytes = random() % 2 ? random() % (12 * kMiB) + 1 : random() % 100'000 + 1;
      blocks.push_back(filled(heap.allocate(bytes), bytes));
      if (!first) first = blocks.front();
      live_bytes += static_cast<std::int64_t>(blocks.back()->size);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      live_bytes -= static_cast<std::int64_t>(blocks.back()->size);
      heap.release(blocks.back());
      blocks.pop_back();
    }
    if (i % 5 == 0) heap.give_back(static_cast<std::int64_t>(random() % (8 * kMiB)));
    if (i % 20 != 0) continue;
    const auto arena = reinterpret_cast<std::uintptr_t>(first) / (2 * kMiB) * (2 * kMiB);
    std::int64_t resident_bytes = 0;
    for (const MappedRange& range : mapped_ranges()) {
      if (range.begin >= arena && range.end <= arena + 512 * kMiB)
        resident_bytes += static_cast<std::int64_t>(range.resident_bytes);
    }
    ASSERT_GE(resident_bytes, live_bytes);
    constexpr std::int64_t kEndOfArena = 4096;  // the mark there is no block's
    ASSERT_LE(resident_bytes, heap.resident_bytes() + kEndOfArena) << "after " << i;
  }
}

TEST(Pool, LeavesAddressSpaceToOthersWhereItIsLimited) {
  EXPECT_EQ(exit_code_with(1000 * kMiB,
                           [] {
                             Heap small(1024 * kMiB), large(64 * 1024 * kMiB);
                             if (!small.allocate(1000) || !large.allocate(100 * kMiB)) return 1;
                             void* others = ::mmap(nullptr, 200 * kMiB, PROT_READ,
                                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                             if (others == MAP_FAILED) return 2;
                             // More arenas as they are needed, and none that would take all.
                             if (!large.allocate(200 * kMiB)) return 3;
                             return large.allocate(900 * kMiB) ? 4 : 0;
                           }),
            0);
}

// So that disks read and write tensors without a copy.
TEST(Pool, DataIsAlignedAfterAnyOrderOfSizes) {
  for (const std::size_t alignment : {std::size_t{64}, kTransferAlignment, std::size_t{4096}}) {
    Heap heap(64 * kMiB, alignment);
    std::vector<Block*> blocks;
    for (std::size_t i = 1; i <= 300; ++i) {
      blocks.push_back(heap.allocate(i * i * 7 % 100'003 + 1));
      ASSERT_NE(blocks.back(), nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()->data()) % alignment, 0U);
      if (i % 3 != 0) continue;
      heap.release(blocks[i / 2]);
      blocks[i / 2] = heap.allocate(i);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks[i / 2]->data()) % alignment, 0U);
    }
    for (Block* block : blocks) heap.release(block);
    // All of it is one block again: the largest that an arena holds.
    EXPECT_NE(heap.allocate(64 * kMiB - 2 * alignment - kGuardBytes), nullptr);
  }
  BlockPool pool;
  for (const std::size_t size : {std::size_t{33} << 10, std::size_t{100'001}, 3 * kMiB + 1}) {
    Block* block = pool.allocate(size, static_cast<std::int64_t>(size));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block->data()) % kTransferAlignment, 0U) << size;
  }
}

TEST(Pool, RefusesABlockThatNoMemoryOfThisMachineCanHold) {
  Heap heap(64 * 1024 * kMiB);
  EXPECT_EQ(heap.allocate(std::size_t{1} << 45), nullptr);  // 32 TiB of address space are granted
  EXPECT_NE(heap.allocate(kMiB), nullptr);
}

// What tells an address sanitizer of a kernel that leaves its tensor.
TEST(Pool, OnlyTheBytesOfLiveBlocksAreValidToASanitizer) {
  if (kGuardBytes == 0) GTEST_SKIP() << "built without an address sanitizer";
  Heap heap(64 * kMiB);
  for (const std::size_t size : {1, 64, 100, 4096, 100'000}) {
    Block* block = heap.allocate(size);
    heap.allocate(64);  // what an overflow would reach
    char* data = static_cast<char*>(block->data());
    EXPECT_FALSE(is_poisoned(data)) << size;
    EXPECT_FALSE(is_poisoned(data + size - 1)) << size;
    EXPECT_TRUE(is_poisoned(data + size)) << size;
    EXPECT_TRUE(is_poisoned(data + size + kGuardBytes - 1)) << size;
    heap.release(block);
    EXPECT_TRUE(is_poisoned(data)) << size;
    EXPECT_TRUE(is_poisoned(data + size - 1)) << size;
  }
}

}  // namespace
}  // namespace headroom
