#pragma once

// Low-rank additions to a linear layer, for functions that compute their gradients themselves.

#include <headroom/ops/transformer.h>
#include "ops/passes.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headroom::ops {

/// The adapters of one linear layer in one call. x (n, in) is what the layer is given, y (n, out)
/// what it returns. Where a layer is run in pieces, `first_row` is that of the piece, so that
/// dropout decides the same for any pieces.
class LowRankCall {
 public:
  LowRankCall() = default;
  /// Draws a seed for each adapter unless dropout_p is 0.
  LowRankCall(const std::vector<LowRank>& adapters, double scale, double dropout_p);
  /// As keep() left it, with the tensors that append_to() gave.
  LowRankCall(const SavedData& saved_data, const char* name, at::TensorList tensors);

  /// Everything but the tensors, under `name`.
  void keep(SavedData& saved_data, const char* name) const;
  /// Of each adapter down and up.
  void append_to(std::vector<at::Tensor>& tensors) const;
  std::size_t num_tensors() const { return 2 * adapters_.size(); }

  bool empty() const { return adapters_.empty(); }
  /// Throws ConfigError unless every adapter fits a layer of these sizes.
  void check(std::int64_t in, std::int64_t out, const char* layer) const;

  /// y += scale * up(down(dropout(x))).
  void add(const at::Tensor& x, const at::Tensor& y, std::int64_t first_row = 0) const;
  /// dx += the gradient of x.
  void add_input_gradient(const at::Tensor& dy, const at::Tensor& dx,
                          std::int64_t first_row = 0) const;
  /// Adds to the gradients of the adapters, in the order of append_to(), or writes them if this is
  /// the first piece and they are new.
  void add_gradients(const at::Tensor& x, const at::Tensor& dy,
                     const std::vector<ParameterGrad>& gradients, std::int64_t first_row = 0) const;

  /// The same as add() by LibTorch's own operations, for other types and devices.
  at::Tensor add_plain(const at::Tensor& x, const at::Tensor& y) const;

 private:
  kernels::Dropout dropout(std::size_t index) const;
  // x as adapter `index` reads it, of which no element may be written.
  at::Tensor read(std::size_t index, const at::Tensor& x, std::int64_t first_row) const;

  std::vector<LowRank> adapters_;
  std::vector<std::int64_t> seeds_;  // of each adapter
  double scale_ = 1.0;
  double dropout_p_ = 0.0;
};

}  // namespace headroom::ops
