// The store of what is spilled and paged: exact, in order, and clear about what goes wrong.
#include "memory/spill_store.h"

#include <headroom/core/error.h>
#include "core/mapped_pages.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("headroom_store" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }
  bool is_empty() const { return fs::is_empty(path_); }

 private:
  fs::path path_;
};

// Of this process.
std::int64_t resident_bytes() {
  std::int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::vector<char> bytes_of(std::int64_t num_bytes, int seed) {
  std::vector<char> bytes(static_cast<std::size_t>(num_bytes));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>((i * 31 + static_cast<std::size_t>(seed) * 17) >> 3);
  return bytes;
}

TEST(SpillStore, GivesBackWhatWasWrittenWhateverTheSize) {
  const Folder folder;
  SpillStore store(folder.path());
  // One byte, less and more than a page, and more than what moves at once.
  for (const std::int64_t size : {1, 4095, 4096, 4097, (4 << 20) + 5, (13 << 20) + 1}) {
    const std::vector<char> written = bytes_of(size, static_cast<int>(size % 7));
    std::vector<char> read(written.size());
    const Extent extent = store.reserve(size);
    EXPECT_EQ(extent.offset % 4096, 0);
    const SpillStore::Ticket write = store.write(extent, written.data());
    const SpillStore::Ticket back = store.read(extent, read.data());  // comes after the write
    store.wait(write);
    store.wait(back);
    EXPECT_TRUE(read == written) << size;
  }
  EXPECT_TRUE(folder.is_empty()) << "the file has no name";
  EXPECT_GT(store.traffic().busy_ns, 0);
  EXPECT_EQ(store.traffic().bytes_read, store.traffic().bytes_written);
}

TEST(SpillStore, ExtentsNeverOverlapAndSpaceIsUsedAgain) {
  const Folder folder;
  SpillStore store(folder.path());
  std::vector<Extent> extents;
  std::vector<std::vector<char>> contents;
  for (int round = 0; round < 200; ++round) {
    if (round % 3 == 2) {
      const std::size_t victim = static_cast<std::size_t>(round * 7) % extents.size();
      store.release(extents[victim]);
      extents.erase(extents.begin() + static_cast<std::ptrdiff_t>(victim));
      contents.erase(contents.begin() + static_cast<std::ptrdiff_t>(victim));
    } else {
      contents.push_back(bytes_of(1 + (round * 1237) % 20000, round));
      extents.push_back(store.reserve(static_cast<std::int64_t>(contents.back().size())));
      store.wait(store.write(extents.back(), contents.back().data()));
    }
  }
  for (std::size_t i = 0; i < extents.size(); ++i) {
    std::vector<char> read(contents[i].size());
    store.wait(store.read(extents[i], read.data()));
    EXPECT_TRUE(read == contents[i]) << i;
  }
  const std::int64_t first = extents.front().offset;
  const std::int64_t size = extents.front().num_bytes;
  store.release(extents.front());
  EXPECT_EQ(store.reserve(size).offset, first);
}

// Whole pages pass the page cache, the rest goes through it.
TEST(SpillStore, PartsOfAnExtentLeaveTheirNeighboursAlone) {
  const Folder folder;
  SpillStore store(folder.path());
  constexpr std::int64_t kPart = 100'001, kNumParts = 30;
  const std::vector<char> whole = bytes_of(kNumParts * kPart, 1);
  std::vector<char> expected = whole;
  const Extent extent = store.reserve(kNumParts * kPart);
  store.wait(store.write(extent, whole.data()));
  for (const std::int64_t part : {3, 0, 29, 12, 13}) {
    const std::vector<char> bytes = bytes_of(kPart, static_cast<int>(part) + 2);
    std::copy(bytes.begin(), bytes.end(), expected.begin() + part * kPart);
    store.wait(store.write({extent.offset + part * kPart, kPart}, bytes.data()));
    std::vector<char> back(expected.size());
    store.wait(store.read(extent, back.data()));
    ASSERT_EQ(back, expected) << part;
  }
}

// Memory of tensors is aligned for the disk, that of others need not be.
TEST(SpillStore, MovesBytesOfAnyAlignment) {
  const Folder folder;
  SpillStore store(folder.path());
  constexpr std::int64_t kBytes = (std::int64_t{9} << 20) + 4097;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(4096, std::size_t{10} << 20)), &std::free);
  const std::vector<char> expected = bytes_of(kBytes, 5);
  const Extent extent = store.reserve(kBytes);
  for (const std::int64_t shift : {0, 512, 64, 1}) {
    char* data = memory.get() + shift;
    std::copy(expected.begin(), expected.end(), data);
    store.wait(store.write(extent, data));
    std::fill_n(data, kBytes, '\0');
    store.wait(store.read(extent, data));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), data)) << shift;
  }
}

TEST(SpillStore, TransfersAndMappingsSeeEachOthersBytes) {
  const Folder folder;
  const auto store = std::make_shared<SpillStore>(folder.path());
  constexpr std::int64_t kBytes = (std::int64_t{3} << 20) + 17;
  const Extent extent = store->reserve(kBytes);
  const c10::DataPtr mapping = SpillStore::map(store, extent);
  auto* mapped = static_cast<char*>(mapping.get());
  for (int round = 0; round < 3; ++round) {
    const std::vector<char> first = bytes_of(kBytes, round), second = bytes_of(kBytes, 100 + round);
    std::copy(first.begin(), first.end(), mapped);
    std::vector<char> back(first.size());
    store->wait(store->read(extent, back.data()));
    ASSERT_EQ(back, first);
    store->wait(store->write(extent, second.data()));
    ASSERT_TRUE(std::equal(second.begin(), second.end(), mapped));
  }
}

TEST(SpillStore, AMappingIsTheSameBytesAndOutlivesTheStoresOwner) {
  const Folder folder;
  auto store = std::make_shared<SpillStore>(folder.path());
  const std::vector<char> written = bytes_of(70000, 3);
  const Extent extent = store->reserve(70000);
  store->wait(store->write(extent, written.data()));
  c10::DataPtr mapping = SpillStore::map(store, extent);
  EXPECT_EQ(mapped_extent(mapping).offset, extent.offset);
  char* memory = static_cast<char*>(mapping.get());
  EXPECT_EQ(std::vector<char>(memory, memory + 70000), written);
  memory[69999] = 'x';  // through memory, back by a transfer
  release_mapped_pages(mapping.get());
  std::vector<char> read(70000);
  store->wait(store->read(extent, read.data()));
  EXPECT_EQ(read.back(), 'x');
  store.reset();
  EXPECT_EQ(memory[0], written[0]);
  EXPECT_EQ(mapped_extent(c10::DataPtr()).num_bytes, 0);
}

// In the tests above and below a mapping is small. A model's embedding is not, and whoever hashes
// or saves it must not bring all of it into memory, which no budget counts.
TEST(SpillStore, OfAMappingThatIsReadInPiecesOnlyAFewAreInMemory) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  constexpr std::int64_t kMostResident = std::int64_t{12} << 20;
  const Folder folder;
  const auto store = std::make_shared<SpillStore>(folder.path());
  const c10::DataPtr mapping = SpillStore::map(store, store->reserve(kBytes));
  const std::int64_t before = resident_bytes();
  std::size_t num_seen = 0;
  std::int64_t most = 0;
  for_each_mapped_piece(mapping.get(), kBytes, [&](const void* data, std::size_t num_bytes) {
    ASSERT_EQ(data, static_cast<const char*>(mapping.get()) + num_seen);
    const auto* bytes = static_cast<const char*>(data);
    EXPECT_EQ(std::count(bytes, bytes + num_bytes, 0), static_cast<std::int64_t>(num_bytes));
    most = std::max(most, resident_bytes() - before);
    num_seen += num_bytes;
  });
  EXPECT_EQ(num_seen, kBytes);
  EXPECT_GT(most, 0);
  EXPECT_LT(most, kMostResident);
}

TEST(SpillStore, AFailedTransferIsTheErrorOfWhoeverWaitsForIt) {
  const Folder folder;
  SpillStore store(folder.path());
  std::vector<char> bytes = bytes_of(5000, 1);
  const Extent good = store.reserve(5000), bad = store.reserve(5000);
  const TransferFaultScope fault([&](TransferKind kind, const Extent& extent) {
    if (extent.offset != bad.offset) return 0;
    return kind == TransferKind::kWrite ? ENOSPC : EIO;
  });
  const SpillStore::Ticket before = store.write(good, bytes.data());
  const SpillStore::Ticket failed = store.write(bad, bytes.data());
  const SpillStore::Ticket after = store.read(good, bytes.data());
  store.wait(before);
  try {
    store.wait(failed);
    FAIL() << "the write did not fail";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(folder.path()), std::string::npos) << error.what();
  }
  store.wait(after);
  EXPECT_THROW(store.wait(store.read(bad, bytes.data())), DataError);
  store.wait_quietly(store.read(bad, bytes.data()));
}

TEST(SpillStore, AFullDiskIsFoundBeforeAnythingIsWritten) {
  const Folder folder;
  SpillStore store(folder.path());
  const rlim_t limit = 1 << 20;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = limit;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_NO_THROW(store.reserve(limit / 2));
  EXPECT_THROW(store.reserve(limit), BudgetError);
  EXPECT_NO_THROW(store.reserve(4096)) << "what fits still does";
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
}

TEST(SpillStore, RefusesAFolderThatIsNotThere) {
  EXPECT_THROW(SpillStore("/nowhere/to/spill"), ConfigError);
}

}  // namespace
}  // namespace headroom
