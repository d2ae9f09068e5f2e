#include "execute/state_stream.h"

#include <headroom/memory/meter.h>
#include "core/integers.h"

#include <torch/types.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace headroom {
namespace {

// One piece is read, one updated and one written at a time.
constexpr std::int64_t kMostPieces = 3;

class PieceRing {
 public:
  /// For pieces of `num_elements` of each of the tensors, which are mapped.
  PieceRing(std::shared_ptr<SpillStore> store, std::vector<at::Tensor> tensors,
            std::int64_t num_elements, std::int64_t num_pieces)
      : store_(std::move(store)), tensors_(std::move(tensors)), num_elements_(num_elements) {
    const OwnerScope owner(Owner::kOptimizer);
    places_.resize(static_cast<std::size_t>(std::min(num_pieces, kMostPieces)));
    for (Place& place : places_) {
      for (const at::Tensor& tensor : tensors_)
        place.buffers.push_back(at::empty({num_elements}, tensor.options()));
    }
  }
  ~PieceRing() {
    for (Place& place : places_) {
      for (const SpillStore::Ticket ticket : place.transfers) store_->wait_quietly(ticket);
    }
  }
  PieceRing(const PieceRing&) = delete;
  PieceRing& operator=(const PieceRing&) = delete;

  /// Starts to read a piece, where the one before in its place is written.
  void read(std::int64_t piece) {
    Place& place = wait(piece);
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      place.transfers.push_back(store_->read(extent(piece, i), place.buffers[i].data_ptr()));
  }
  std::vector<at::Tensor> receive(std::int64_t piece) {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& buffer : wait(piece).buffers)
      pieces.push_back(buffer.slice(0, 0, end_of(piece) - piece * num_elements_));
    return pieces;
  }
  void write(std::int64_t piece) {
    Place& place = place_of(piece);
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      place.transfers.push_back(store_->write(extent(piece, i), place.buffers[i].data_ptr()));
  }
  /// Throws what a transfer threw.
  void finish() {
    for (std::size_t i = 0; i < places_.size(); ++i) wait(static_cast<std::int64_t>(i));
  }

  std::int64_t end_of(std::int64_t piece) const {
    return std::min((piece + 1) * num_elements_, tensors_.front().numel());
  }

 private:
  struct Place {
    std::vector<at::Tensor> buffers;            // by tensor
    std::vector<SpillStore::Ticket> transfers;  // under way
  };

  Place& place_of(std::int64_t piece) {
    return places_[static_cast<std::size_t>(piece) % places_.size()];
  }
  Place& wait(std::int64_t piece) {
    Place& place = place_of(piece);
    while (!place.transfers.empty()) {
      const SpillStore::Ticket ticket = place.transfers.back();
      place.transfers.pop_back();
      store_->wait(ticket);
    }
    return place;
  }
  Extent extent(std::int64_t piece, std::size_t tensor) const {
    const auto element_bytes = static_cast<std::int64_t>(tensors_[tensor].element_size());
    const std::int64_t begin = piece * num_elements_;
    return {mapped_extent(tensors_[tensor].storage().data_ptr()).offset + begin * element_bytes,
            (end_of(piece) - begin) * element_bytes};
  }

  std::shared_ptr<SpillStore> store_;
  std::vector<at::Tensor> tensors_;
  const std::int64_t num_elements_;
  std::vector<Place> places_;
};

}  // namespace

std::int64_t state_stream_bytes(std::int64_t parameter_bytes, std::int64_t state_bytes,
                                std::int64_t piece_bytes) {
  if (parameter_bytes == 0 || state_bytes % parameter_bytes != 0) return 0;
  const std::int64_t num_pieces = divide_up(parameter_bytes, piece_bytes);
  return state_bytes / parameter_bytes * std::min(num_pieces, kMostPieces) *
         std::min(parameter_bytes, piece_bytes);
}

void step_streaming(const std::shared_ptr<SpillStore>& store, LeanOptimizer& optimizer,
                    at::Tensor& parameter, std::size_t group, std::int64_t piece_bytes) {
  std::vector<at::Tensor> state = optimizer.state_tensors(parameter);
  if (state.empty()) return optimizer.step_parameter(parameter, group);  // nothing has to pass
  const auto element_bytes = static_cast<std::int64_t>(parameter.element_size());
  const std::int64_t num_elements = std::min(parameter.numel(), piece_bytes / element_bytes);
  const std::int64_t num_pieces = divide_up(parameter.numel(), num_elements);
  PieceRing ring(store, std::move(state), num_elements, num_pieces);
  ring.read(0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    if (piece + 1 < num_pieces) ring.read(piece + 1);
    optimizer.step_piece(parameter, group, piece * num_elements, ring.end_of(piece),
                         ring.receive(piece));
    ring.write(piece);
  }
  ring.finish();
}

}  // namespace headroom
