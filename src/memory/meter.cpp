#include <headroom/memory/meter.h>

#include <headroom/core/bytes.h>
#include "core/torch_compat.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <new>
#include <sstream>
#include <vector>

#include "core/engine.h"
#include "memory/allocation_number.h"
#include "memory/device.h"
#include "memory/spill_store.h"

namespace headroom {
namespace {

thread_local Owner thread_owner = Owner::kOther;

std::size_t index_of(Owner owner) { return static_cast<std::size_t>(owner); }
std::size_t index_of(Phase phase) { return static_cast<std::size_t>(phase); }

std::string refusal(std::int64_t requested_bytes, const MemoryUse& use, std::int64_t cap_bytes) {
  std::vector<Owner> owners;
  for (std::size_t i = 0; i < kNumOwners; ++i) {
    if (use.live_by_owner[i] > 0) owners.push_back(static_cast<Owner>(i));
  }
  std::sort(owners.begin(), owners.end(), [&](Owner a, Owner b) {
    return use.live_by_owner[index_of(a)] > use.live_by_owner[index_of(b)];
  });
  std::string biggest;
  for (std::size_t i = 0; i < std::min<std::size_t>(owners.size(), 3); ++i) {
    biggest += fmt::format("{}{} {}", i ? ", " : "", owner_name(owners[i]),
                           format_bytes(use.live_by_owner[index_of(owners[i])]));
  }
  return fmt::format(
      "out of budget: {} bytes asked for with {} live of {} allowed ({} of {}); biggest owners: {}",
      requested_bytes, use.live_bytes, cap_bytes, format_bytes(use.live_bytes),
      format_bytes(cap_bytes), biggest.empty() ? "none" : biggest);
}

// All counts change under one lock together with the device's memory, so that every figure is exact
// at any moment.
class MeteredAllocator final : public c10::Allocator {
 public:
  // Tensors may outlive every static object, so the allocator is never destroyed.
  static MeteredAllocator& instance() {
    static auto* allocator = new MeteredAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t num_bytes) HEADROOM_ALLOCATE_CONST override {
    return instance().take(num_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  HEADROOM_DEFINE_COPY_DATA

  static void give(void* data) {
    if (data) instance().put_back(data);
  }

  MemoryUse use() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return use_;
  }

  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    use_.peak_bytes = use_.live_bytes;
    use_.peak_by_owner = use_.live_by_owner;
    use_.peak_by_phase = {};
    use_.peak_by_phase[index_of(phase_)] = use_.live_bytes;
  }

  void set_cap(std::int64_t cap_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cap_bytes_ = std::max<std::int64_t>(cap_bytes, 0);
  }

  std::int64_t cap() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cap_bytes_;
  }

  void assign_owner(void* data, Owner owner) {
    const std::lock_guard<std::mutex> lock(mutex_);
    BlockRecord& record = device_.record_of(data);
    use_.live_by_owner[record.owner] -= record.requested_bytes;
    record.owner = static_cast<std::uint8_t>(owner);
    add_to_owner(owner, record.requested_bytes);
  }

  void trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    device_.trim(use_.live_bytes);
  }

  std::uint64_t allocation_number(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return device_.record_of(data).allocation_number;
  }

  Phase enter(Phase phase) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Phase before = phase_;
    phase_ = phase;
    raise(use_.peak_by_phase[index_of(phase)], use_.live_bytes);
    return before;
  }

 private:
  MeteredAllocator() = default;

  static void raise(std::int64_t& peak, std::int64_t value) { peak = std::max(peak, value); }

  void add_to_owner(Owner owner, std::int64_t bytes) {
    std::int64_t& live = use_.live_by_owner[index_of(owner)];
    live += bytes;
    raise(use_.peak_by_owner[index_of(owner)], live);
  }

  c10::DataPtr take(std::size_t num_bytes) {
    if (num_bytes == 0) return {nullptr, nullptr, &give, device_.name()};
    if (c10::DataPtr mapped = MappedAllocationScope::allocate(num_bytes)) return mapped;
    const auto bytes = static_cast<std::int64_t>(num_bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    if (cap_bytes_ > 0 && (bytes > cap_bytes_ || use_.live_bytes > cap_bytes_ - bytes)) {
      const MemoryUse use = use_;
      const std::int64_t cap_bytes = cap_bytes_;
      lock.unlock();
      throw OutOfBudget(bytes, use.live_bytes, cap_bytes, refusal(bytes, use, cap_bytes));
    }
    void* data = device_.take(num_bytes, use_.live_bytes + bytes);
    if (!data) {
      const std::int64_t live_bytes = use_.live_bytes;
      lock.unlock();
      throw c10::OutOfMemoryError(fmt::format("the system refused {} bytes with {} bytes of "
                                              "tensors live; a smaller batch needs less",
                                              num_bytes, live_bytes),
                                  HEADROOM_NO_BACKTRACE);
    }
    device_.record_of(data) = {bytes, ++last_allocation_number,
                               static_cast<std::uint8_t>(thread_owner)};
    use_.live_bytes += bytes;
    raise(use_.peak_bytes, use_.live_bytes);
    raise(use_.peak_by_phase[index_of(phase_)], use_.live_bytes);
    add_to_owner(thread_owner, bytes);
    return {data, data, &give, device_.name()};
  }

  void put_back(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const BlockRecord& record = device_.record_of(data);
    use_.live_bytes -= record.requested_bytes;
    use_.live_by_owner[record.owner] -= record.requested_bytes;
    device_.give_back(data);
  }

  mutable std::mutex mutex_;
  MemoryUse use_;
  std::int64_t cap_bytes_ = 0;
  Phase phase_ = Phase::kIdle;
  Device& device_ = metered_device();
};

// Start of the tensor's storage; null when the meter did not allocate it.
void* metered_data(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &MeteredAllocator::give ? data.get_context() : nullptr;
}

std::int64_t status_bytes(const char* key) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(key, 0) != 0) continue;
    std::int64_t kibibytes = 0;
    std::istringstream(line.substr(line.find(':') + 1)) >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

}  // namespace

const char* owner_name(Owner owner) {
  static constexpr std::array<const char*, kNumOwners> kNames = {
      "weights", "gradients", "optimizer", "activations", "inputs", "other"};
  return kNames[index_of(owner)];
}

const char* phase_name(Phase phase) {
  static constexpr std::array<const char*, kNumPhases> kNames = {"idle", "forward", "backward",
                                                                 "update"};
  return kNames[index_of(phase)];
}

// Without a backtrace: finding a micro-batch that fits may throw this a thousand times, and a trace
// costs milliseconds.
OutOfBudget::OutOfBudget(std::int64_t requested_bytes, std::int64_t live_bytes,
                         std::int64_t cap_bytes, const std::string& message)
    : c10::OutOfMemoryError(message, HEADROOM_NO_BACKTRACE),
      requested_bytes_(requested_bytes),
      live_bytes_(live_bytes),
      cap_bytes_(cap_bytes) {}

MemoryMeter& MemoryMeter::instance() {
  static MemoryMeter* meter = [] {
    install_engine();
    metered_device().install(MeteredAllocator::instance());
    return new MemoryMeter;
  }();
  return *meter;
}

std::int64_t MemoryMeter::live_bytes() const { return use().live_bytes; }
std::int64_t MemoryMeter::peak_bytes() const { return use().peak_bytes; }
MemoryUse MemoryMeter::use() const { return MeteredAllocator::instance().use(); }
void MemoryMeter::reset_peak() { MeteredAllocator::instance().reset_peak(); }
void MemoryMeter::set_cap(std::int64_t cap_bytes) {
  MeteredAllocator::instance().set_cap(cap_bytes);
}
std::int64_t MemoryMeter::cap() const { return MeteredAllocator::instance().cap(); }
void MemoryMeter::trim() { MeteredAllocator::instance().trim(); }

void MemoryMeter::assign_owner(const at::Tensor& tensor, Owner owner) {
  if (void* data = metered_data(tensor)) MeteredAllocator::instance().assign_owner(data, owner);
}

std::uint64_t MemoryMeter::num_allocations() const { return last_allocation_number; }

std::uint64_t MemoryMeter::allocation_number(const at::Tensor& tensor) const {
  if (tensor.defined() && tensor.is_meta()) return shape_allocation_number(tensor);
  void* data = metered_data(tensor);
  return data ? MeteredAllocator::instance().allocation_number(data) : 0;
}

OwnerScope::OwnerScope(Owner owner) : before_(thread_owner) { thread_owner = owner; }
OwnerScope::~OwnerScope() { thread_owner = before_; }
Owner current_owner() { return thread_owner; }

PhaseScope::PhaseScope(Phase phase) : before_(MeteredAllocator::instance().enter(phase)) {}
PhaseScope::~PhaseScope() { MeteredAllocator::instance().enter(before_); }

void release_failed_backward() { release_failed_graph(); }

std::int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }
std::int64_t resident_bytes() { return status_bytes("VmRSS:"); }

}  // namespace headroom
