#include "memory/device.h"

#include <c10/core/CPUAllocator.h>

#include "memory/pool.h"

namespace headroom {
namespace {

class CpuDevice final : public Device {
 public:
  c10::Device name() const override { return c10::Device(c10::kCPU); }
  void install(c10::Allocator& allocator) override {
    c10::SetCPUAllocator(&allocator, /*priority=*/1);
  }

  void* take(std::size_t num_bytes, std::int64_t live_bytes) override {
    Block* block = pool_.allocate(num_bytes, live_bytes);
    return block == nullptr ? nullptr : block->data();
  }
  // The CPU can read what it hands out, so the record is in front of the data.
  BlockRecord& record_of(void* data) override { return *Block::of(data); }
  void give_back(void* data) override { pool_.release(Block::of(data)); }
  void trim(std::int64_t live_bytes) override { pool_.trim(live_bytes); }

  // Every operation on the CPU has ended when its call returns.
  void synchronize() override {}

 private:
  BlockPool pool_;
};

}  // namespace

// Tensors may outlive every static object, so the device is never destroyed.
Device& metered_device() {
  static auto* device = new CpuDevice;
  return *device;
}

}  // namespace headroom
