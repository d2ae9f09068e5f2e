#pragma once

// Boundaries that are held in another form than their tensors, and stages that read them.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine.h"
#include "execute/stored_tensor.h"

namespace headroom {

/// The tensors between two stages, stored in a format. Whoever reads them gets what the format
/// gives back, in the shapes and strides that they had.
class StoredBoundary {
 public:
  /// `store` is for formats that need one, and is written to while the caller continues. Tensors of
  /// types that the format does not apply to stay as they are. What `below`, a boundary in the same
  /// format or null, has given of these tensors (a long skip) is not stored a second time. Throws
  /// BudgetError when a disk is full.
  StoredBoundary(std::vector<at::Tensor> tensors, KeepAs format,
                 const std::shared_ptr<SpillStore>& store, const StoredBoundary* below = nullptr);

  /// Brings the tensors back, unless they are in memory from an earlier call.
  const std::vector<at::Tensor>& read();
  /// Starts to bring them back, where that goes on beside the caller.
  void fetch();
  /// Lets go of the tensors. Throws BudgetError when a disk is full.
  void drop();

 private:
  /// The elements of a storage from the first to the last that some tensor reads.
  struct Span {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  struct Piece {
    std::shared_ptr<const Stored> stored;
    at::Tensor plain;  // where there is no other form
    // Where the elements are, or were last, in memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    at::ScalarType type = at::kFloat;
    Span span;
    std::int64_t version = 0;
  };
  struct View {
    int piece = -1;  // negative: an undefined tensor
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset = 0;  // in the piece
  };

  static Span span_of(const at::Tensor& tensor);
  const Piece* piece_with(const at::Tensor& tensor, const Span& span) const;

  std::vector<Piece> pieces_;
  std::vector<View> views_;
  std::vector<at::Tensor> decoded_;
};

/// While the scope lives, what autograd saves of a stage's inputs is not held: it is read from the
/// boundary again when backward needs it. Everything else is saved as it would be without the
/// scope.
class SavedFromBoundary final : public SavedTensorHookSource {
 public:
  /// `inputs` are what the stage is given: tensor i is boundary->read()[i], or the same in another
  /// type.
  SavedFromBoundary(std::shared_ptr<StoredBoundary> boundary,
                    const std::vector<at::Tensor>& inputs);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

 private:
  class Hooks;
  struct Input {
    const void* storage = nullptr;
    at::ScalarType dtype = at::kFloat;
    std::int64_t offset = 0;
    std::int64_t version = 0;
  };

  std::shared_ptr<StoredBoundary> boundary_;
  std::vector<Input> inputs_;
  SavedTensorHookSource* outer_;
  SavedTensorHookScope scope_;
};

}  // namespace headroom
