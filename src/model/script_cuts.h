#pragma once

// Where a flat graph may be cut, and where it is.

#include "model/script_graph.h"

#include <headroom/core/micro_batch.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace headroom::script {

/// A place between two nodes of the top level, and what crosses it. Arguments and state do not:
/// every stage reads them where they are.
struct Cut {
  std::size_t position = 0;  ///< before this node
  std::vector<torch::jit::Value*> tensors;
  /// Numbers and lists of ints that later nodes read and cannot find out again from shapes; they
  /// cross as small tensors.
  std::vector<torch::jit::Value*> numbers;
  /// Before this one: it may be made only together with another cut in each of these ranges of
  /// positions, the first excluded.
  std::vector<std::pair<std::size_t, std::size_t>> needs_cuts_in;
};

struct CutGraph {
  FlatGraph flat;
  std::vector<torch::jit::Node*> nodes;  ///< of the top level, without constants
  std::vector<Cut> cuts;                 ///< every legal one, in order
};

/// Finds the places where the graph may be cut: no later node writes to memory that crosses, no
/// `with` block is open, and the gradient of a parameter that is used thrice or more is summed in
/// the same order. Of neighbours with the same crossing tensors the first is taken.
CutGraph find_cuts(FlatGraph flat);

/// Whether a cut may be made behind those that were, which are in order.
bool may_follow(const Cut& cut, const std::vector<const Cut*>& made);

/// Whether the node reads nothing of a tensor that a write to its elements would change.
bool reads_shape_only(const torch::jit::Node* node);

/// A number that crosses, as a tensor, and back.
at::Tensor pack(const torch::jit::IValue& value);
torch::jit::IValue unpack(const at::Tensor& tensor, const c10::TypePtr& type);

}  // namespace headroom::script
