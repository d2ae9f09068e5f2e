#pragma once

// The forms in which a tensor's elements wait for backward.

#include <headroom/execute/executor.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <memory>

#include "memory/spill_store.h"

namespace headroom {

/// Elements in another form, in the order in which they lie in memory. Several holders may share
/// them, in several shapes.
class Stored {
 public:
  virtual ~Stored() = default;
  /// A flat tensor of all elements, in their own type and on their own device.
  virtual at::Tensor restore() const = 0;
  /// Takes the memory of the next restore(), and starts to fill it where that goes on beside the
  /// caller.
  virtual void fetch() const {}
  virtual std::int64_t num_bytes() const = 0;
  /// Returns when the elements need no memory but their own form: until then the tensor that they
  /// came from is held, and must not change. Throws what storing them threw.
  virtual void settle() const {}
  virtual at::Tensor flat_half() const {
    return {};
  }  ///< the halves themselves, where that is what is stored
};

class InHalf final : public Stored {
 public:
  InHalf(at::ScalarType dtype, at::Tensor flat_half);
  at::Tensor restore() const override;
  std::int64_t num_bytes() const override;
  at::Tensor flat_half() const override { return half_; }

 private:
  at::ScalarType dtype_;
  at::Tensor half_;
};

/// Is written while the caller continues.
class OnDisk final : public Stored {
 public:
  OnDisk(const at::Tensor& flat, std::shared_ptr<SpillStore> store);
  ~OnDisk() override;
  at::Tensor restore() const override;
  void fetch() const override;
  std::int64_t num_bytes() const override { return extent_.num_bytes; }
  void settle() const override;

 private:
  std::shared_ptr<SpillStore> store_;
  at::TensorOptions options_;
  std::int64_t num_elements_;
  Extent extent_;
  SpillStore::Ticket ticket_ = 0;
  mutable at::Tensor pending_;   // while it is being written
  mutable at::Tensor incoming_;  // while it is being read
  mutable SpillStore::Ticket incoming_ticket_ = 0;
  std::int64_t version_ = 0;
};

/// One row of the table of formats. To add one: a KeepAs, a Stored and its row.
struct KeptFormat {
  KeepAs format;
  const char* name;   ///< in plans and messages
  double size_ratio;  ///< bytes of memory that it takes, to those of a float tensor
  bool is_exact;      ///< what comes back is what was stored, bit for bit
  bool needs_store;   ///< a SpillStore holds the elements
  /// Whether tensors of this type have this form; others stay as they are.
  bool (*applies_to)(at::ScalarType type);
  /// A flat tensor of such a type in this form. `store` is null unless the format needs one.
  std::shared_ptr<const Stored> (*store)(const at::Tensor& flat,
                                         const std::shared_ptr<SpillStore>& store);

  /// The store that tensors in this form go to, in `folder`; null for a form that needs none.
  std::shared_ptr<SpillStore> make_store(const std::string& folder) const;
};
const KeptFormat& kept_format(KeepAs format);

/// One saved tensor that is kept as usual. With hooks in place LibTorch leaves the check of
/// versions to us.
class PassThroughHooks final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override;
  at::Tensor call_unpack_hook() override;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
};

}  // namespace headroom
