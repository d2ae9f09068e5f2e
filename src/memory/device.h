#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace headroom {

/// What the meter notes about each block of memory that it hands out.
struct BlockRecord {
  std::int64_t requested_bytes;
  std::uint64_t allocation_number;
  std::uint8_t owner;
};

/// What depends on the kind of device that tensors live on: where their memory comes from, where
/// the notes about it are, and when work is done. The meter counts, caps and locks above this
/// interface for any device; a second device is a second file beside cpu_device.cpp.
class Device {
 public:
  virtual ~Device() = default;

  virtual c10::Device name() const = 0;
  /// Makes `allocator` the one that every new tensor on this device asks.
  virtual void install(c10::Allocator& allocator) = 0;

  /// Memory for `num_bytes` > 0, aligned to 64 bytes, and to what a disk wants where it is worth a
  /// transfer; null when there is no more. `live_bytes` is what callers hold, this request
  /// included. This and the next three are not thread-safe.
  virtual void* take(std::size_t num_bytes, std::int64_t live_bytes) = 0;
  /// Of memory that was taken and is not given back yet. The taker writes the record before it
  /// gives the memory back.
  virtual BlockRecord& record_of(void* data) = 0;
  virtual void give_back(void* data) = 0;
  /// Returns everything that is not handed out to the system.
  virtual void trim(std::int64_t live_bytes) = 0;

  /// Returns when all work that was handed to the device is done.
  virtual void synchronize() = 0;
};

/// The device that the meter meters; lives as long as the process.
Device& metered_device();

}  // namespace headroom
