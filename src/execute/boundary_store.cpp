#include "execute/boundary_store.h"

#include "core/tensor_storage.h"
#include "execute/boundary_format.h"
#include "ops/convert.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace headroom {
namespace {

namespace autograd = torch::autograd;
using Clock = std::chrono::steady_clock;

c10::weak_intrusive_ptr<c10::StorageImpl> memory_of(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

std::int64_t version_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor._version());
}

}  // namespace

StoredBoundary::Span StoredBoundary::span_of(const at::Tensor& tensor) {
  Span span{tensor.storage_offset(), tensor.storage_offset()};
  if (tensor.numel() == 0) return span;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    span.end += (tensor.size(i) - 1) * tensor.stride(i);
  ++span.end;
  return span;
}

// The piece whose elements are these and have not been written to, if there is one. Memory that is
// still there has its address for itself.
const StoredBoundary::Piece* StoredBoundary::piece_with(const at::Tensor& tensor,
                                                        const Span& span) const {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return piece.stored && !piece.memory.expired() &&
           piece.memory._unsafe_get_target() == storage_of(tensor) &&
           piece.type == tensor.scalar_type() && piece.span.begin <= span.begin &&
           span.end <= piece.span.end && piece.version == version_of(tensor);
  });
  return found == pieces_.end() ? nullptr : &*found;
}

// Tensors that share memory share a piece, so that reading them back takes no more memory than they
// had.
StoredBoundary::StoredBoundary(std::vector<at::Tensor> tensors, KeepAs format,
                               const std::shared_ptr<SpillStore>& store,
                               const StoredBoundary* below) {
  using Key = std::pair<const void*, at::ScalarType>;
  const KeptFormat& row = kept_format(format);
  std::map<Key, Span> spans;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const Span span = span_of(tensor);
    const auto [known, is_new] = spans.emplace(Key(storage_of(tensor), tensor.scalar_type()), span);
    if (!is_new)
      known->second = {std::min(known->second.begin, span.begin),
                       std::max(known->second.end, span.end)};
  }
  std::map<Key, int> pieces;
  for (const at::Tensor& tensor : tensors) {
    View view;
    if (tensor.defined()) {
      const Key key(storage_of(tensor), tensor.scalar_type());
      const auto [known, is_new] = pieces.emplace(key, static_cast<int>(pieces_.size()));
      if (is_new) {
        const Span span = spans.at(key);
        const Piece* there = below == nullptr ? nullptr : below->piece_with(tensor, span);
        if (there != nullptr) {
          pieces_.push_back(*there);
        } else {
          const at::Tensor flat =
              tensor.detach().as_strided({span.end - span.begin}, {1}, span.begin);
          Piece piece{nullptr, {}, memory_of(flat), flat.scalar_type(), span, version_of(tensor)};
          if (row.applies_to(flat.scalar_type()))
            piece.stored = row.store(flat, store);
          else
            piece.plain = flat;
          pieces_.push_back(std::move(piece));
        }
      }
      const Piece& piece = pieces_[static_cast<std::size_t>(known->second)];
      view = {known->second, tensor.sizes().vec(), tensor.strides().vec(),
              tensor.storage_offset() - piece.span.begin};
    }
    views_.push_back(std::move(view));
  }
  // What comes back is what was stored: the next reader need not wait for it.
  if (row.is_exact) decoded_ = std::move(tensors);
}

void StoredBoundary::drop() {
  for (const Piece& piece : pieces_) {
    if (piece.stored) piece.stored->settle();
  }
  decoded_.clear();
}

void StoredBoundary::fetch() {
  if (!decoded_.empty()) return;
  for (const Piece& piece : pieces_) {
    if (piece.stored) piece.stored->fetch();
  }
}

const std::vector<at::Tensor>& StoredBoundary::read() {
  if (!decoded_.empty()) return decoded_;
  std::vector<at::Tensor> restored;
  for (Piece& piece : pieces_) {
    restored.push_back(piece.stored ? piece.stored->restore() : piece.plain);
    if (!piece.stored) continue;
    const std::int64_t begin = restored.back().storage_offset();
    piece.span = {begin, begin + restored.back().numel()};
    piece.memory = memory_of(restored.back());
    piece.version = version_of(restored.back());
  }
  for (const View& view : views_) {
    if (view.piece < 0) {
      decoded_.emplace_back();
      continue;
    }
    const at::Tensor& flat = restored[static_cast<std::size_t>(view.piece)];
    decoded_.push_back(
        flat.as_strided(view.sizes, view.strides, flat.storage_offset() + view.offset));
  }
  return decoded_;
}

// One saved tensor. Whether it is a piece of the input shows when it is packed, which is always
// inside of the scope.
class SavedFromBoundary::Hooks final : public autograd::SavedVariableHooks {
 public:
  explicit Hooks(const SavedFromBoundary& source) : source_(source) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    for (std::size_t i = 0; i < source_.inputs_.size(); ++i) {
      const Input& input = source_.inputs_[i];
      // An input that the stage has changed is no longer what the boundary holds.
      if (input.storage == nullptr || storage_of(tensor) != input.storage ||
          tensor.scalar_type() != input.dtype || version_of(tensor) != input.version) {
        continue;
      }
      boundary_ = source_.boundary_;
      index_ = i;
      dtype_ = input.dtype;
      sizes_ = tensor.sizes().vec();
      strides_ = tensor.strides().vec();
      offset_ = tensor.storage_offset() - input.offset;
      return;
    }
    if (source_.outer_ != nullptr) other_ = source_.outer_->make_hooks();
    if (!other_) other_ = std::make_unique<PassThroughHooks>();
    other_->call_pack_hook(tensor);
  }

  at::Tensor call_unpack_hook() override {
    if (other_) return other_->call_unpack_hook();
    at::Tensor input = boundary_->read()[index_];
    if (input.scalar_type() != dtype_) input = convert(input, dtype_);
    return input.as_strided(sizes_, strides_, input.storage_offset() + offset_);
  }

 private:
  const SavedFromBoundary& source_;
  std::unique_ptr<autograd::SavedVariableHooks> other_;
  std::shared_ptr<StoredBoundary> boundary_;
  std::size_t index_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<std::int64_t> sizes_, strides_;
  std::int64_t offset_ = 0;
};

SavedFromBoundary::SavedFromBoundary(std::shared_ptr<StoredBoundary> boundary,
                                     const std::vector<at::Tensor>& inputs)
    : boundary_(std::move(boundary)), outer_(current_hook_source()), scope_(this) {
  for (const at::Tensor& input : inputs) {
    inputs_.push_back(input.defined() ? Input{storage_of(input), input.scalar_type(),
                                              input.storage_offset(), version_of(input)}
                                      : Input{});
  }
}

std::unique_ptr<autograd::SavedVariableHooks> SavedFromBoundary::make_hooks() {
  return std::make_unique<Hooks>(*this);
}

// Of an operation's time; the rest is what copying costs the operation itself.
constexpr double kTransferOverlap = 0.8;

BoundaryFormat measure_boundary_format(KeepAs format, std::int64_t boundary_bytes,
                                       const std::string& folder) {
  constexpr std::int64_t kTotalBytes = std::int64_t{8} << 20;
  constexpr std::int64_t kFewestRuns = 3;
  constexpr std::int64_t kMostRuns = 64;
  const std::int64_t num_floats = std::max<std::int64_t>(boundary_bytes / 4, 1024);
  const std::int64_t num_runs = std::clamp(kTotalBytes / (4 * num_floats), kFewestRuns, kMostRuns);
  const KeptFormat& row = kept_format(format);
  const std::shared_ptr<SpillStore> store = row.make_store(folder);
  std::int64_t encode_ns = 0;
  std::int64_t decode_ns = 0;
  for (std::int64_t run = -1; run < num_runs; ++run) {
    std::vector<at::Tensor> tensors = {at::ones({num_floats}, at::kFloat)};
    const auto start = Clock::now();
    StoredBoundary boundary(std::move(tensors), format, store);
    boundary.drop();
    const auto stored = Clock::now();
    boundary.read();
    const auto read = Clock::now();
    if (run < 0) continue;  // the first one makes the file grow and the kernels known
    encode_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(stored - start).count();
    decode_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(read - stored).count();
  }
  const auto num_bytes = static_cast<double>(num_runs * num_floats * 4);
  BoundaryFormat costs;
  costs.name = row.name;
  costs.size_ratio = row.size_ratio;
  costs.encode_ns_per_byte = static_cast<double>(encode_ns) / num_bytes;
  costs.encode_overlap = costs.decode_overlap = row.needs_store ? kTransferOverlap : 0.0;
  costs.decode_ns_per_byte = static_cast<double>(decode_ns) / num_bytes;
  return costs;
}

}  // namespace headroom
