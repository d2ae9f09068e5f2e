#include "memory/spill_store.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include "core/integers.h"
#include "core/mapped_pages.h"
#include "memory/pool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

namespace headroom {
namespace {

// Extents begin and end on pages of the file system, so that they can be mapped.
constexpr std::int64_t kAlignment = 4096;
// So much is moved by one call, for a stop or a failure to be seen soon. Through the page cache,
// where there is no other way, twice that is in the cache meanwhile.
constexpr std::int64_t kChunkBytes = std::int64_t{4} << 20;
// Pieces below this may stay in the page cache: to wait for the disk would cost more than they are.
constexpr std::int64_t kSmallBytes = std::int64_t{64} << 10;
constexpr std::size_t kMostRecords = 8192;

std::int64_t whole_pages(std::int64_t num_bytes) {
  return divide_up(std::max<std::int64_t>(num_bytes, 1), kAlignment) * kAlignment;
}

std::string folder_or_default(const std::string& folder) {
  if (!folder.empty()) return folder;
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary ? temporary : "/tmp";
}

int open_nameless(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
    return descriptor;
  // Some file systems know no nameless files: take the name away at once.
  std::string path = folder + "/headroom-spill-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

int open_or_throw(const std::string& folder) {
  const int descriptor = open_nameless(folder);
  if (descriptor >= 0) return descriptor;
  throw ConfigError(fmt::format(
      "cannot make a spill file in '{}': {}; choose a folder that exists and can be written",
      folder, std::strerror(errno)));
}

// The same file, for transfers past the page cache; -1 where its file system has none.
int open_direct(int descriptor) {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  return ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
}

// Signals are for the threads that know what to do with them.
std::thread start_without_signals(std::function<void()> work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(work));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

// Of this thread.
std::int64_t processor_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::mutex fault_mutex;
TransferFaultScope::Fault injected_fault;

int fault_of(TransferKind kind, const Extent& extent) {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  return injected_fault ? injected_fault(kind, extent) : 0;
}

// Writes a part of the file out of the page cache, and lets the cache drop it. False, with errno,
// when the disk refused; where a file system has nothing to flush, there is nothing to fail.
bool flush(int descriptor, std::int64_t offset, std::int64_t num_bytes) {
  const bool is_written = ::sync_file_range(descriptor, offset, num_bytes,
                                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                                SYNC_FILE_RANGE_WAIT_AFTER) == 0 ||
                          errno == ENOSYS || errno == EINVAL || errno == ESPIPE;
  ::posix_fadvise(descriptor, offset, num_bytes, POSIX_FADV_DONTNEED);
  return is_written;
}

struct Mapping {
  std::shared_ptr<SpillStore> store;
  Extent extent;
  void* address = nullptr;
  std::size_t length = 0;
};

void delete_mapping(void* context) {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  remove_mapped_pages(mapping->address);
  ::munmap(mapping->address, mapping->length);
  mapping->store->release(mapping->extent);
}

const Mapping* mapping_of(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_mapping ? static_cast<const Mapping*>(data.get_context())
                                               : nullptr;
}

}  // namespace

TransferFaultScope::TransferFaultScope(Fault fault) {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  injected_fault = std::move(fault);
}

TransferFaultScope::~TransferFaultScope() {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  injected_fault = nullptr;
}

SpillStore::SpillStore(const std::string& folder)
    : folder_(folder_or_default(folder)),
      descriptor_(open_or_throw(folder_)),
      direct_(open_direct(descriptor_)),
      thread_(start_without_signals([this] { serve(); })) {}

SpillStore::~SpillStore() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (direct_ >= 0) ::close(direct_);
  ::close(descriptor_);
}

Extent SpillStore::reserve(std::int64_t num_bytes) {
  const std::int64_t length = whole_pages(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second < length) continue;
    const auto [offset, available] = *range;
    free_.erase(range);
    if (available > length) free_[offset + length] = available - length;
    return {offset, num_bytes};
  }
  const int error = ::posix_fallocate(descriptor_, end_, length);
  if (error != 0) {
    throw BudgetError(
        fmt::format("cannot spill {} to '{}': {}; choose a folder with more space, or keep more in "
                    "memory",
                    format_bytes(num_bytes), folder_, std::strerror(error)));
  }
  return {std::exchange(end_, end_ + length), num_bytes};
}

void SpillStore::release(const Extent& extent) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t offset = extent.offset;
  std::int64_t length = whole_pages(extent.num_bytes);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + length) {
    length += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      free_.erase(before);
    }
  }
  if (offset + length < end_) {
    free_[offset] = length;
    return;
  }
  end_ = offset;
  static_cast<void>(::ftruncate(descriptor_, static_cast<::off_t>(end_)) == 0);
}

SpillStore::Ticket SpillStore::write(const Extent& extent, const void* data) {
  // The thread only reads what it writes to the file.
  return enqueue({TransferKind::kWrite, extent, static_cast<char*>(const_cast<void*>(data))});
}

SpillStore::Ticket SpillStore::read(const Extent& extent, void* data) {
  return enqueue({TransferKind::kRead, extent, static_cast<char*>(data)});
}

SpillStore::Ticket SpillStore::enqueue(Transfer transfer) {
  Ticket ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(transfer);
    ticket = ++last_ticket_;
  }
  changed_.notify_all();
  return ticket;
}

void SpillStore::wait(Ticket ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return last_done_ >= ticket; });
  const auto failure = failures_.find(ticket);
  if (failure == failures_.end()) return;
  const std::exception_ptr error = failure->second;
  failures_.erase(failure);
  lock.unlock();
  std::rethrow_exception(error);
}

void SpillStore::wait_quietly(Ticket ticket) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return last_done_ >= ticket; });
  failures_.erase(ticket);
}

void SpillStore::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Transfer transfer = queue_.front();
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t before = processor_ns();
    try {
      carry_out(transfer);
    } catch (...) {
      failure = std::current_exception();
    }
    const auto end = std::chrono::steady_clock::now();
    const std::int64_t worked = processor_ns() - before;
    lock.lock();
    traffic_.processor_ns += worked;
    traffic_.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
    recent_.push_back({transfer.kind, transfer.extent.num_bytes, start, end});
    if (recent_.size() > kMostRecords) recent_.pop_front();
    (transfer.kind == TransferKind::kRead ? traffic_.bytes_read : traffic_.bytes_written) +=
        transfer.extent.num_bytes;
    ++last_done_;
    if (failure) failures_[last_done_] = failure;
    changed_.notify_all();
  }
}

void SpillStore::carry_out(const Transfer& transfer) {
  if (const int error = fault_of(transfer.kind, transfer.extent))
    fail(transfer, std::strerror(error));
  const std::int64_t done = move_directly(transfer);
  const auto [offset, num_bytes] = transfer.extent;
  if (done == num_bytes) return;
  const Transfer rest{transfer.kind, {offset + done, num_bytes - done}, transfer.data + done};
  rest.kind == TransferKind::kRead ? read_all(rest) : write_all(rest);
}

// The page cache would take a copy by the system for every byte, time that computing needs, and
// memory that no budget counts. Some file systems take that way in silence where memory is not
// aligned, so it is looked at here.
std::int64_t SpillStore::move_directly(const Transfer& transfer) {
  const auto [offset, num_bytes] = transfer.extent;
  const bool is_aligned = offset % kAlignment == 0 &&
                          reinterpret_cast<std::uintptr_t>(transfer.data) % kTransferAlignment == 0;
  if (direct_ < 0 || num_bytes < kSmallBytes || !is_aligned) return 0;
  const bool reads = transfer.kind == TransferKind::kRead;
  const std::int64_t end = num_bytes / kAlignment * kAlignment;
  std::int64_t done = 0;
  while (done < end) {
    const auto length = static_cast<std::size_t>(std::min(kChunkBytes, end - done));
    char* data = transfer.data + done;
    const ::ssize_t count = reads ? ::pread(direct_, data, length, offset + done)
                                  : ::pwrite(direct_, data, length, offset + done);
    if (count < 0 && errno == EINTR) continue;
    // A file system may open the file so and want other sizes, or end a transfer inside of a page.
    if ((count < 0 && errno == EINVAL) || (count > 0 && count % kAlignment != 0)) return done;
    if (count <= 0) fail(transfer, count == 0 ? "nothing was moved" : std::strerror(errno));
    done += count;
  }
  return done;
}

// The disk is given one chunk while the next is copied into the page cache.
void SpillStore::write_all(const Transfer& transfer) {
  const auto [offset, num_bytes] = transfer.extent;
  std::int64_t flushed = 0;
  for (std::int64_t done = 0; done < num_bytes;) {
    const ::ssize_t count =
        ::pwrite(descriptor_, transfer.data + done,
                 static_cast<std::size_t>(std::min(kChunkBytes, num_bytes - done)), offset + done);
    if (count == 0 || (count < 0 && errno != EINTR))
      fail(transfer, count == 0 ? "nothing was written" : std::strerror(errno));
    if (count < 0) continue;
    done += count;
    if (num_bytes < kSmallBytes) continue;
    ::sync_file_range(descriptor_, offset + flushed, done - flushed, SYNC_FILE_RANGE_WRITE);
    if (done - flushed < 2 * kChunkBytes) continue;
    if (!flush(descriptor_, offset + flushed, kChunkBytes)) fail(transfer, std::strerror(errno));
    flushed += kChunkBytes;
  }
  if (num_bytes >= kSmallBytes && !flush(descriptor_, offset + flushed, num_bytes - flushed))
    fail(transfer, std::strerror(errno));
}

void SpillStore::read_all(const Transfer& transfer) {
  const auto [offset, num_bytes] = transfer.extent;
  for (std::int64_t done = 0; done < num_bytes;) {
    // The chunk after this one comes while this one is copied.
    const std::int64_t ahead = done + kChunkBytes;
    if (ahead < num_bytes)
      ::posix_fadvise(descriptor_, offset + ahead, std::min(kChunkBytes, num_bytes - ahead),
                      POSIX_FADV_WILLNEED);
    const ::ssize_t count =
        ::pread(descriptor_, transfer.data + done,
                static_cast<std::size_t>(std::min(kChunkBytes, num_bytes - done)), offset + done);
    if (count == 0 || (count < 0 && errno != EINTR))
      fail(transfer, count == 0 ? "the file is too short" : std::strerror(errno));
    if (count < 0) continue;
    if (num_bytes >= kSmallBytes)
      ::posix_fadvise(descriptor_, offset + done, count, POSIX_FADV_DONTNEED);
    done += count;
  }
}

void SpillStore::fail(const Transfer& transfer, const std::string& reason) const {
  if (transfer.kind == TransferKind::kWrite) {
    throw BudgetError(fmt::format(
        "cannot spill {} to '{}': {}; choose a folder with more space, or keep more in memory",
        format_bytes(transfer.extent.num_bytes), folder_, reason));
  }
  throw DataError(fmt::format("cannot read {} back from the spill file in '{}' at offset {}: {}",
                              format_bytes(transfer.extent.num_bytes), folder_,
                              transfer.extent.offset, reason));
}

c10::DataPtr SpillStore::map(const std::shared_ptr<SpillStore>& store, const Extent& extent) {
  auto mapping = std::make_unique<Mapping>();
  mapping->length = static_cast<std::size_t>(whole_pages(extent.num_bytes));
  mapping->address = ::mmap(nullptr, mapping->length, PROT_READ | PROT_WRITE, MAP_SHARED,
                            store->descriptor_, extent.offset);
  if (mapping->address == MAP_FAILED) {
    throw BudgetError(fmt::format("cannot map {} of the spill file in '{}': {}",
                                  format_bytes(extent.num_bytes), store->folder_,
                                  std::strerror(errno)));
  }
  mapping->store = store;
  mapping->extent = extent;
  void* address = mapping->address;
  add_mapped_pages(address, mapping->length);
  return {address, mapping.release(), &delete_mapping, c10::Device(c10::kCPU)};
}

SpillTraffic SpillStore::traffic() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return traffic_;
}

std::vector<TransferRecord> SpillStore::recent_transfers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {recent_.begin(), recent_.end()};
}

Extent mapped_extent(const c10::DataPtr& data) {
  const Mapping* mapping = mapping_of(data);
  return mapping == nullptr ? Extent{} : mapping->extent;
}

std::shared_ptr<SpillStore> mapped_store(const c10::DataPtr& data) {
  const Mapping* mapping = mapping_of(data);
  return mapping == nullptr ? nullptr : mapping->store;
}

namespace {
thread_local MappedAllocationScope* current_scope = nullptr;
}  // namespace

MappedAllocationScope::MappedAllocationScope(std::shared_ptr<SpillStore> store)
    : store_(std::move(store)), outer_(std::exchange(current_scope, this)) {}

MappedAllocationScope::~MappedAllocationScope() {
  release_mapped_pages(latest_);
  current_scope = outer_;
}

c10::DataPtr MappedAllocationScope::allocate(std::size_t num_bytes) {
  const auto bytes = static_cast<std::int64_t>(num_bytes);
  if (current_scope == nullptr || bytes < kSmallBytes) return {};
  MappedAllocationScope& scope = *current_scope;
  release_mapped_pages(scope.latest_);
  c10::DataPtr data = SpillStore::map(scope.store_, scope.store_->reserve(bytes));
  scope.latest_ = data.get();
  return data;
}

}  // namespace headroom
