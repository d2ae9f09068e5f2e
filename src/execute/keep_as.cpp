#include <headroom/execute/keep_as.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "execute/spill_file.h"
#include "memory/engine.h"

namespace headroom {
namespace {

namespace autograd = torch::autograd;

constexpr std::size_t kSmallBytes = 4096;

// A saved tensor in another form. Several operations may hold it.
class Stored {
 public:
  virtual ~Stored() = default;
  virtual at::Tensor restore() const = 0;
  virtual std::int64_t num_bytes() const = 0;
};

class AsItIs final : public Stored {
 public:
  explicit AsItIs(const at::Tensor& tensor) : tensor_(tensor.detach()), version_(tensor._version()) {}
  at::Tensor restore() const override {
    // With hooks in place LibTorch leaves this check to us.
    TORCH_CHECK(tensor_._version() == version_, "one of the variables needed for gradient computation has been modified by an inplace operation: ",
                tensor_.toString(), " ", tensor_.sizes(), " is at version ", tensor_._version(), "; expected version ", version_, " instead");
    return tensor_;
  }
  std::int64_t num_bytes() const override { return static_cast<std::int64_t>(tensor_.nbytes()); }

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

class Bf16 final : public Stored {
 public:
  explicit Bf16(const at::Tensor& tensor) : dtype_(tensor.scalar_type()), half_(tensor.detach().to(at::kBFloat16)) {}
  at::Tensor restore() const override { return half_.to(dtype_); }
  std::int64_t num_bytes() const override { return static_cast<std::int64_t>(half_.nbytes()); }

 private:
  at::ScalarType dtype_;
  at::Tensor half_;
};

class OnDisk final : public Stored {
 public:
  OnDisk(const at::Tensor& tensor, std::shared_ptr<SpillFile> file)
      : file_(std::move(file)), options_(tensor.options()), sizes_(tensor.sizes().vec()) {
    // A dense tensor is stored as it lies, so that it comes back with its strides; backward may run another kernel for other strides.
    const bool is_dense = tensor.is_non_overlapping_and_dense() && tensor.is_cpu();
    const at::Tensor flat = is_dense ? tensor : tensor.cpu().contiguous();
    strides_ = is_dense ? tensor.strides().vec() : flat.strides().vec();
    num_bytes_ = flat.nbytes();
    offset_ = file_->write(flat.data_ptr(), num_bytes_);
  }
  ~OnDisk() override { file_->release(offset_, num_bytes_); }

  at::Tensor restore() const override {
    at::Tensor tensor = at::empty_strided(sizes_, strides_, options_.device(at::kCPU).requires_grad(false));
    file_->read(offset_, tensor.data_ptr(), num_bytes_);
    return tensor.to(options_.device());
  }
  std::int64_t num_bytes() const override { return static_cast<std::int64_t>(num_bytes_); }

 private:
  std::shared_ptr<SpillFile> file_;
  at::TensorOptions options_;
  std::vector<std::int64_t> sizes_, strides_;
  std::size_t num_bytes_ = 0;
  std::int64_t offset_ = 0;
};

class StoredTensor final : public autograd::SavedVariableHooks {
 public:
  using Store = std::shared_ptr<const Stored> (*)(void* source, const at::Tensor& tensor);
  StoredTensor(void* source, Store store) : source_(source), store_(store) {}
  void call_pack_hook(const at::Tensor& tensor) override { stored_ = store_(source_, tensor); }
  at::Tensor call_unpack_hook() override { return stored_->restore(); }

 private:
  void* source_;  // lives as long as the scope, and only the scope makes hooks
  Store store_;
  std::shared_ptr<const Stored> stored_;
};

std::string folder_or_default(const std::string& folder) {
  if (!folder.empty()) return folder;
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary ? temporary : "/tmp";
}

}  // namespace

class KeepAsScope::Source final : public SavedTensorHookSource {
 public:
  Source(KeepAs format, const std::string& folder) : format_(format), newest_old_allocation_(MemoryMeter::instance().num_allocations()) {
    if (format == KeepAs::kDisk) file_ = std::make_shared<SpillFile>(folder_or_default(folder));
  }

  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<StoredTensor>(
        this, [](void* source, const at::Tensor& tensor) { return static_cast<Source*>(source)->store(tensor); });
  }

  std::int64_t original_bytes = 0, stored_bytes = 0;

 private:
  // A storage at a moment, and the part of it that was saved.
  using Key = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>, at::ScalarType>;

  bool is_kept_anyway(const at::Tensor& tensor) const {
    if (tensor.nbytes() < kSmallBytes || tensor.layout() != at::kStrided || !tensor.has_storage()) return true;
    if (format_ == KeepAs::kBf16 && tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) return true;
    // A parameter, or a view of one such as weight.t(), which is no leaf itself.
    const at::TensorBase& base = tensor.is_view() ? tensor._base() : static_cast<const at::TensorBase&>(tensor);
    if (base.is_leaf() && base.requires_grad()) return true;
    return tensor.is_leaf() && MemoryMeter::instance().allocation_number(tensor) <= newest_old_allocation_;
  }

  std::shared_ptr<const Stored> store(const at::Tensor& tensor) {
    if (is_kept_anyway(tensor)) return std::make_shared<AsItIs>(tensor);
    const std::uint64_t allocation = MemoryMeter::instance().allocation_number(tensor);
    if (allocation == 0) return transform(tensor);
    const Key key(allocation, tensor._version(), tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type());
    std::weak_ptr<const Stored>& known = stored_[key];
    std::shared_ptr<const Stored> stored = known.lock();
    if (!stored) known = stored = transform(tensor);
    return stored;
  }

  std::shared_ptr<const Stored> transform(const at::Tensor& tensor) {
    std::shared_ptr<const Stored> stored;
    if (format_ == KeepAs::kBf16) {
      stored = std::make_shared<Bf16>(tensor);
    } else {
      stored = std::make_shared<OnDisk>(tensor, file_);
    }
    original_bytes += static_cast<std::int64_t>(tensor.nbytes());
    stored_bytes += stored->num_bytes();
    return stored;
  }

  KeepAs format_;
  std::uint64_t newest_old_allocation_;
  std::shared_ptr<SpillFile> file_;
  std::map<Key, std::weak_ptr<const Stored>> stored_;
};

struct KeepAsScope::State {
  State(KeepAs format, const std::string& folder) : source(format, folder), scope(&source) {}
  Source source;
  SavedTensorHookScope scope;
};

KeepAsScope::KeepAsScope(KeepAs format, const std::string& folder) : state_(std::make_unique<State>(format, folder)) {}
KeepAsScope::~KeepAsScope() = default;
std::int64_t KeepAsScope::original_bytes() const { return state_->source.original_bytes; }
std::int64_t KeepAsScope::stored_bytes() const { return state_->source.stored_bytes; }

}  // namespace headroom
