#include "memory/shape_meter.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include "core/torch_compat.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "memory/allocation_number.h"
#include "memory/shape_kernels.h"

namespace headroom {
namespace {

// What stands for a tensor's memory.
struct ShapeBlock {
  std::int64_t num_bytes;
  std::uint64_t allocation_number;
};

class ShapeAllocator final : public c10::Allocator {
 public:
  // Tensors may outlive every static object, so the allocator is never destroyed.
  static ShapeAllocator& instance() {
    static auto* allocator = new ShapeAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t num_bytes) HEADROOM_ALLOCATE_CONST override {
    const c10::Device meta(c10::kMeta);
    if (num_bytes == 0) return {nullptr, nullptr, &give, meta};
    if (num_bytes > static_cast<std::size_t>(kMaxBytes - instance().live())) {
      throw ConfigError(fmt::format(
          "a tensor of {} bytes beside {}: the sizes of the model or the batch are out of bounds",
          num_bytes, format_bytes(instance().live())));
    }
    auto* block = new ShapeBlock{static_cast<std::int64_t>(num_bytes), ++last_allocation_number};
    instance().add(block->num_bytes);
    return {nullptr, block, &give, meta};
  }
  HEADROOM_DEFINE_COPY_NOTHING

  static void give(void* context) {
    if (context == nullptr) return;
    auto* block = static_cast<ShapeBlock*>(context);
    instance().add(-block->num_bytes);
    delete block;
  }

  std::int64_t live() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return live_bytes_;
  }
  std::int64_t peak() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peak_bytes_;
  }
  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    peak_bytes_ = live_bytes_;
  }

 private:
  // More than any machine has, and few enough for sums of several peaks.
  static constexpr std::int64_t kMaxBytes = std::int64_t{1} << 60;

  void add(std::int64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  }

  mutable std::mutex mutex_;
  std::int64_t live_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
};

// The tensor gets the shape, memory and device of `like`, and stays what it is to autograd.
void become(const at::Tensor& tensor, const at::Tensor& like) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(like.getIntrusivePtr());
}

}  // namespace

std::uint64_t shape_allocation_number(const at::Tensor& tensor) {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &ShapeAllocator::give || data.get_context() == nullptr) return 0;
  return static_cast<const ShapeBlock*>(data.get_context())->allocation_number;
}

ShapeMeter& ShapeMeter::instance() {
  static ShapeMeter* meter = [] {
    c10::SetAllocator(c10::kMeta, &ShapeAllocator::instance(), /*priority=*/1);
    register_shape_kernels();
    return new ShapeMeter;
  }();
  return *meter;
}

std::int64_t ShapeMeter::live_bytes() const { return ShapeAllocator::instance().live(); }
std::int64_t ShapeMeter::peak_bytes() const { return ShapeAllocator::instance().peak(); }
void ShapeMeter::reset_peak() { ShapeAllocator::instance().reset_peak(); }

// A factory that names no device goes to the backend that this thread includes, once nothing
// selects one from the options before. (LibTorch's own guard leaves the backend included when it
// ends, so that the state is put back as a whole.)
struct ShapeOnlyScope::Before {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
};

ShapeOnlyScope::ShapeOnlyScope() {
  ShapeMeter::instance();
  before_ = std::make_unique<Before>();
  c10::impl::LocalDispatchKeySet keys = before_->keys;
  keys.included_ = keys.included_ | c10::DispatchKeySet(c10::DispatchKey::Meta);
  keys.excluded_ = keys.excluded_ | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

ShapeOnlyScope::~ShapeOnlyScope() { c10::impl::_force_tls_local_dispatch_key_set(before_->keys); }

MetaSwapScope::MetaSwapScope(const std::vector<at::Tensor>& tensors) {
  ShapeMeter::instance();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_meta()) continue;
    const at::Tensor original = tensor.detach();
    become(tensor, shape_of(original));
    originals_.emplace_back(tensor, original);
  }
}

MetaSwapScope::~MetaSwapScope() {
  for (const auto& [tensor, original] : originals_) become(tensor, original);
}

at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(at::kMeta).requires_grad(false));
}

}  // namespace headroom
