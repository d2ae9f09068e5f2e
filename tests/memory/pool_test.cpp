// What the pool takes from the system beside the budget.
#include "memory/pool.h"
#include "memory/poison.h"

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
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
