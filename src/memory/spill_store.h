#pragma once

// Bytes that wait on disk: activations that a plan spills, weights, gradients and optimizer state
// that it pages.

#include <c10/core/Allocator.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace headroom {

/// A range of a store's file.
struct Extent {
  std::int64_t offset = 0;
  std::int64_t num_bytes = 0;
};

enum class TransferKind { kRead, kWrite };

/// What a store has moved.
struct SpillTraffic {
  std::int64_t bytes_read = 0;
  std::int64_t bytes_written = 0;
  std::int64_t busy_ns = 0;       ///< that its thread spent on transfers
  std::int64_t processor_ns = 0;  ///< of those, on a core
};

/// When a transfer was carried out.
struct TransferRecord {
  TransferKind kind = TransferKind::kRead;
  std::int64_t num_bytes = 0;
  std::chrono::steady_clock::time_point begin, end;
};

/// While one lives, the transfers of every store ask it first: a number other than 0 is the errno
/// with which the transfer fails. For tests of what happens then. One at a time.
class TransferFaultScope {
 public:
  using Fault = std::function<int(TransferKind kind, const Extent& extent)>;
  explicit TransferFaultScope(Fault fault);
  ~TransferFaultScope();
  TransferFaultScope(const TransferFaultScope&) = delete;
  TransferFaultScope& operator=(const TransferFaultScope&) = delete;
};

/// A file without a name, which ends with the process however that ends, and a thread that moves
/// bytes between it and memory while the callers compute. Transfers are carried out in the order in
/// which they were asked for. What was moved does not stay in the system's page cache, but for
/// small pieces. Thread-safe.
class SpillStore {
 public:
  /// Stands for one transfer.
  using Ticket = std::uint64_t;

  /// In `folder`; empty: the system's folder for temporary files. Throws ConfigError when that is
  /// not possible.
  explicit SpillStore(const std::string& folder);
  /// Waits for what is under way.
  ~SpillStore();
  SpillStore(const SpillStore&) = delete;
  SpillStore& operator=(const SpillStore&) = delete;

  /// Space for so many bytes, which the disk has from then on. Throws BudgetError, with the
  /// numbers, when it has not.
  Extent reserve(std::int64_t num_bytes);
  /// The space may be reserved again. No transfer of it may be under way.
  void release(const Extent& extent) noexcept;

  /// Start a transfer of a whole extent. `data` must stay as it is until wait() has returned.
  Ticket write(const Extent& extent, const void* data);
  Ticket read(const Extent& extent, void* data);
  /// Returns when the transfer is done. Throws BudgetError when it could not be written and
  /// DataError when it could not be read. To be called once for each ticket.
  void wait(Ticket ticket);
  /// The same for callers that unwind: never throws.
  void wait_quietly(Ticket ticket) noexcept;

  /// The bytes of an extent as memory that the system reads and writes when it is touched, and that
  /// no meter counts. Tensors on it are right, and slow. The extent is released with it; the file
  /// lives as long as a mapping of it.
  static c10::DataPtr map(const std::shared_ptr<SpillStore>& store, const Extent& extent);

  SpillTraffic traffic() const;
  /// The last few thousand transfers, in order.
  std::vector<TransferRecord> recent_transfers() const;
  const std::string& folder() const { return folder_; }

 private:
  struct Transfer {
    TransferKind kind;
    Extent extent;
    char* data;
  };

  Ticket enqueue(Transfer transfer);
  void serve();
  void carry_out(const Transfer& transfer);
  // Moves whole pages from the front past the page cache, without a copy, and returns how many
  // bytes that were: all but the last part of a page, or fewer where the memory or the file system
  // does not allow it.
  std::int64_t move_directly(const Transfer& transfer);
  void write_all(const Transfer& transfer);
  void read_all(const Transfer& transfer);
  [[noreturn]] void fail(const Transfer& transfer, const std::string& reason) const;

  const std::string folder_;
  const int descriptor_;
  const int direct_;  // the same file past the page cache; -1: not possible
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, std::int64_t> free_;  // offset to length, no two adjacent
  std::int64_t end_ = 0;
  std::deque<Transfer> queue_;
  Ticket last_ticket_ = 0;
  Ticket last_done_ = 0;
  std::map<Ticket, std::exception_ptr> failures_;
  SpillTraffic traffic_;
  std::deque<TransferRecord> recent_;
  bool is_ending_ = false;
  std::thread thread_;
};

/// While the scope lives, tensors of this thread that are not small are made on mappings of a store
/// instead of memory, for models that are larger than memory.
class MappedAllocationScope {
 public:
  explicit MappedAllocationScope(std::shared_ptr<SpillStore> store);
  ~MappedAllocationScope();
  MappedAllocationScope(const MappedAllocationScope&) = delete;
  MappedAllocationScope& operator=(const MappedAllocationScope&) = delete;

  /// Memory for an allocation of this thread; null outside of a scope, and for a small one.
  static c10::DataPtr allocate(std::size_t num_bytes);

 private:
  std::shared_ptr<SpillStore> store_;
  const void* latest_ = nullptr;  // what was made last; what came before is filled
  MappedAllocationScope* outer_;
};

/// The store behind a mapping; null for any other memory.
std::shared_ptr<SpillStore> mapped_store(const c10::DataPtr& data);
/// The extent that the memory behind a DataPtr maps; no bytes for any other memory.
Extent mapped_extent(const c10::DataPtr& data);
}  // namespace headroom
