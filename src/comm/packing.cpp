#include "comm/packing.h"

#include <headroom/comm/communicator.h>

#include <torch/types.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

constexpr std::int64_t kMostScratchBytes = std::int64_t{1} << 20;
constexpr std::int64_t kSmallBytes =
    std::int64_t{1} << 17;  // below this, a message of its own costs more than two copies
constexpr std::int64_t kAlignment = 8;

at::ScalarType wire_type(const at::Tensor& tensor, Wire wire) {
  if (wire == Wire::kBytes) return at::kByte;
  return tensor.scalar_type() == at::kBFloat16 ? at::kFloat : tensor.scalar_type();
}

bool is_empty(const at::Tensor& tensor) { return !tensor.defined() || tensor.numel() == 0; }

// Same memory, one dimension. It does not own the memory: whoever exchanges it may let go of it
// late, on a thread of its own.
at::Tensor flat_view(const at::Tensor& dense, Wire wire) {
  if (wire == Wire::kBytes)
    return at::from_blob(dense.data_ptr(), {static_cast<std::int64_t>(dense.nbytes())}, at::kByte);
  return at::from_blob(dense.data_ptr(), {dense.numel()}, dense.scalar_type());
}

bool travels_alone(const at::Tensor& tensor, Wire wire) {
  return static_cast<std::int64_t>(tensor.nbytes()) >= kSmallBytes &&
         (wire == Wire::kBytes || wire_type(tensor, wire) == tensor.scalar_type());
}

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Pieces of one type, next to each other in the scratch memory until they are exchanged.
class Bucket {
 public:
  Bucket(at::Tensor scratch, const std::function<void(at::Tensor&)>& exchange)
      : scratch_(std::move(scratch)), exchange_(exchange) {}

  void add(const at::Tensor& flat, at::ScalarType type) {
    const auto element = static_cast<std::int64_t>(c10::elementSize(type));
    if (type != type_) flush();
    type_ = type;
    const std::int64_t capacity = scratch_.numel() / element;
    for (std::int64_t done = 0; done < flat.numel();) {
      if (used_ == capacity) flush();
      const std::int64_t count = std::min(flat.numel() - done, capacity - used_);
      const at::Tensor piece = flat.narrow(0, done, count);
      elements(used_, count).copy_(piece);
      pieces_.emplace_back(used_, piece);
      used_ += count;
      done += count;
    }
  }

  void flush() {
    if (used_ == 0) return;
    at::Tensor all = elements(0, used_);
    exchange_(all);
    for (auto& [first, piece] : pieces_) piece.copy_(elements(first, piece.numel()));
    pieces_.clear();
    used_ = 0;
  }

 private:
  at::Tensor elements(std::int64_t first, std::int64_t count) const {
    char* start = static_cast<char*>(scratch_.data_ptr()) +
                  first * static_cast<std::int64_t>(c10::elementSize(type_));
    return at::from_blob(start, {count}, type_);
  }

  at::Tensor scratch_;  // bytes
  const std::function<void(at::Tensor&)>& exchange_;
  at::ScalarType type_ = at::kByte;
  std::int64_t used_ = 0;  // elements
  std::vector<std::pair<std::int64_t, at::Tensor>> pieces_;
};

}  // namespace

std::int64_t packed_bytes(const std::vector<at::Tensor>& tensors, Wire wire) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (is_empty(tensor) || travels_alone(tensor, wire)) continue;
    const at::ScalarType type = wire_type(tensor, wire);
    const std::int64_t count =
        wire == Wire::kBytes ? static_cast<std::int64_t>(tensor.nbytes()) : tensor.numel();
    bytes += aligned(count * static_cast<std::int64_t>(c10::elementSize(type)));
  }
  return std::min(bytes, kMostScratchBytes);
}

std::int64_t exchange_scratch_bytes(const std::vector<at::Tensor>& tensors,
                                    std::int64_t num_ranks) {
  return num_ranks == 1
             ? 0
             : std::max(packed_bytes(tensors, Wire::kNumbers), packed_bytes(tensors, Wire::kBytes));
}

void exchange_packed(const std::vector<at::Tensor>& tensors, Wire wire, at::Tensor scratch,
                     const std::function<void(at::Tensor& flat)>& exchange) {
  const torch::NoGradGuard no_grad;
  const std::int64_t bytes = packed_bytes(tensors, wire);
  if (!scratch.defined()) scratch = at::empty({bytes}, at::kByte);
  TORCH_INTERNAL_ASSERT(scratch.numel() >= bytes, "scratch memory of ", scratch.numel(), " bytes, ",
                        bytes, " are needed");
  Bucket bucket(scratch.narrow(0, 0, bytes), exchange);
  std::vector<std::pair<at::Tensor, at::Tensor>>
      copies;  // of tensors whose memory has gaps: the tensor and its copy
  for (const at::Tensor& tensor : tensors) {
    if (is_empty(tensor)) continue;
    at::Tensor dense = tensor;
    if (!tensor.is_non_overlapping_and_dense()) {
      dense = tensor.detach().contiguous();
      copies.emplace_back(tensor.detach(), dense);
    }
    at::Tensor flat = flat_view(dense, wire);
    if (travels_alone(tensor, wire)) {
      exchange(flat);
    } else {
      bucket.add(flat, wire_type(tensor, wire));
    }
  }
  bucket.flush();
  for (auto& [tensor, copy] : copies) tensor.copy_(copy);
}

}  // namespace headroom
