#include <headroom/execute/executor.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "ops/convert.h"

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/engine.h"
#include "execute/stored_tensor.h"

namespace headroom {
namespace {

namespace autograd = torch::autograd;

}  // namespace

class KeepAsScope::Source final : public SavedTensorHookSource {
 public:
  Source(KeepAs format, const std::string& folder)
      : format_(kept_format(format)),
        newest_old_allocation_(MemoryMeter::instance().num_allocations()),
        store_(format_.make_store(folder)) {}

  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }

  void already_stored(const at::Tensor& tensor, const at::Tensor& half) {
    auto stored =
        std::make_shared<InHalf>(tensor.scalar_type(), half.as_strided({half.numel()}, {1}));
    stored_[key_of(tensor)] = stored;
    known_.push_back(std::move(stored));
  }

  at::Tensor stored_half(const at::Tensor& tensor) const {
    if (!tensor.is_non_overlapping_and_dense()) return {};
    const auto found = stored_.find(key_of(tensor));
    const std::shared_ptr<const Stored> stored =
        found == stored_.end() ? nullptr : found->second.lock();
    const at::Tensor half = stored ? stored->flat_half() : at::Tensor();
    return half.defined() ? half.as_strided(tensor.sizes(), tensor.strides()) : half;
  }

  std::int64_t original_bytes = 0, stored_bytes = 0;

 private:
  // One saved tensor. Whether it is transformed shows when it is packed, which is always inside of
  // the scope.
  class Hooks final : public autograd::SavedVariableHooks {
   public:
    explicit Hooks(Source& source) : source_(source) {}

    void call_pack_hook(const at::Tensor& tensor) override {
      if (source_.is_kept_anyway(tensor)) {
        as_it_is_ = std::make_unique<PassThroughHooks>();
        as_it_is_->call_pack_hook(tensor);
        return;
      }
      // A dense tensor is stored as it lies and comes back with its strides, for which backward may
      // choose its kernel.
      const at::Tensor dense =
          tensor.is_non_overlapping_and_dense() ? tensor.detach() : tensor.detach().contiguous();
      sizes_ = dense.sizes().vec();
      strides_ = dense.strides().vec();
      stored_ = source_.store(dense);
    }

    at::Tensor call_unpack_hook() override {
      return as_it_is_ ? as_it_is_->call_unpack_hook()
                       : stored_->restore().as_strided(sizes_, strides_);
    }

   private:
    Source& source_;
    std::unique_ptr<PassThroughHooks> as_it_is_;
    std::vector<std::int64_t> sizes_, strides_;
    std::shared_ptr<const Stored> stored_;
  };

  // A piece of a storage at a moment: allocation, version, offset, number of elements, type.
  using Key = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t, at::ScalarType>;

  bool is_kept_anyway(const at::Tensor& tensor) const {
    if (tensor.nbytes() < kSmallestConvertedBytes || tensor.layout() != at::kStrided ||
        !tensor.has_storage())
      return true;
    if (!format_.applies_to(tensor.scalar_type())) return true;
    // A parameter, or a view of one such as weight.t(), which is no leaf itself.
    const at::TensorBase& base =
        tensor.is_view() ? tensor._base() : static_cast<const at::TensorBase&>(tensor);
    if (base.is_leaf() && base.requires_grad()) return true;
    return tensor.is_leaf() &&
           MemoryMeter::instance().allocation_number(tensor) <= newest_old_allocation_;
  }

  static Key key_of(const at::Tensor& dense) {
    return Key(MemoryMeter::instance().allocation_number(dense), dense._version(),
               dense.storage_offset(), dense.numel(), dense.scalar_type());
  }

  // Reshaped views of one tensor are the same piece, which is stored once.
  std::shared_ptr<const Stored> store(const at::Tensor& dense) {
    const at::Tensor flat = dense.as_strided({dense.numel()}, {1});
    if (MemoryMeter::instance().allocation_number(dense) == 0) return transform(flat);
    std::weak_ptr<const Stored>& known = stored_[key_of(dense)];
    std::shared_ptr<const Stored> stored = known.lock();
    if (!stored) known = stored = transform(flat);
    return stored;
  }

  std::shared_ptr<const Stored> transform(const at::Tensor& flat) {
    std::shared_ptr<const Stored> stored = format_.store(flat, store_);
    stored->settle();  // autograd may let go of the tensor now
    original_bytes += static_cast<std::int64_t>(flat.nbytes());
    stored_bytes += stored->num_bytes();
    return stored;
  }

  const KeptFormat& format_;
  std::uint64_t newest_old_allocation_;
  std::shared_ptr<SpillStore> store_;
  std::map<Key, std::weak_ptr<const Stored>> stored_;
  std::vector<std::shared_ptr<const Stored>> known_;  // keeps those alive that were there before
};

struct KeepAsScope::State {
  State(KeepAs format, const std::string& folder) : source(format, folder), scope(&source) {}
  Source source;
  SavedTensorHookScope scope;
};

KeepAsScope::KeepAsScope(KeepAs format, const std::string& folder)
    : state_(std::make_unique<State>(format, folder)) {}
KeepAsScope::~KeepAsScope() = default;
void KeepAsScope::already_stored(const at::Tensor& tensor, const at::Tensor& half) {
  state_->source.already_stored(tensor, half);
}
at::Tensor KeepAsScope::stored_half(const at::Tensor& tensor) const {
  return state_->source.stored_half(tensor);
}
std::int64_t KeepAsScope::original_bytes() const { return state_->source.original_bytes; }
std::int64_t KeepAsScope::stored_bytes() const { return state_->source.stored_bytes; }

}  // namespace headroom
