#pragma once

#include <headroom/config/chain_costs.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// What one step of a schedule does. In the words below a_0 is the chain's input and a_l the output
/// of stage l (a *boundary*); stages count from 1. Three things can hold a boundary: the chain
/// itself (a_0, for ever), a kept stage (a_l is part of what stage l keeps), or a slot of its own
/// (stored, in some format). A boundary that nothing holds yet is the *head*: the output of the
/// forward before, alive until the next operation takes it. There is at most one head, and the
/// operation after it runs the stage that reads it.
enum class OperationKind {
  /// Runs stage l forward without autograd, keeping nothing: reads a_{l-1}, makes a_l the head. If
  /// a_{l-1} was the head it is dropped
  /// after the run; if it is held, it stays.
  kForward,
  /// First puts the head a_{l-1} into a slot, in `format`; then like kForward. With a format other
  /// than full, the run reads the decoded
  /// value, not the head from which it was encoded, so that a later recompute sees the same
  /// numbers. (A boundary that something holds
  /// already stays as it is; plans do not ask for that.)
  kForwardStore,
  /// Runs stage l forward with autograd, in the way of `option`. If a_{l-1} is the head, it is put
  /// into a slot first, in `format`, as
  /// above. Live afterwards are a_{l-1}, wherever it is held, and what the option keeps, a_l
  /// included. There is no head afterwards.
  kForwardKeep,
  /// Runs stage l backward: consumes the gradient of a_l and what stage l kept, both freed
  /// afterwards; leaves the gradient of a_{l-1},
  /// and the parameter gradients of stage l. For the last stage the gradient of a_l is the implicit
  /// 1 of the loss.
  kBackward,
  /// Drops a_{l-1} from its slot. Comes right after backward of stage l, when a_{l-1} is neither
  /// a_0 nor part of a kept stage l-1.
  kFree,
};

/// "forward", "forward_store", "forward_keep", "backward" or "free".
const char* operation_name(OperationKind kind);

struct Operation {
  OperationKind kind = OperationKind::kForward;
  int stage = 1;   ///< from 1
  int option = 0;  ///< of kForwardKeep and kBackward: index into the stage's options
  /// How a_{stage-1} is held: 0 is full (as it is), i > 0 is boundary_formats[i - 1]. Every
  /// operation that reads a boundary stored in another format than full decodes it into a temporary
  /// of its own, backward included.
  int format = 0;

  bool operator==(const Operation& other) const {
    return kind == other.kind && stage == other.stage && option == other.option &&
           format == other.format;
  }
};

/// The bytes around one operation: everything but a_0, as the model counts them.
struct OperationBytes {
  std::int64_t peak_bytes = 0;  ///< during the operation
  std::int64_t live_bytes = 0;  ///< after it
};

/// A schedule for one micro-batch, and what it is predicted to cost.
struct Schedule {
  std::vector<Operation> operations;
  std::int64_t time_ns = 0;
  std::int64_t peak_bytes = 0;
  std::size_t peak_operation = 0;     ///< index of the first operation that reaches the peak
  std::vector<OperationBytes> curve;  ///< one entry per operation
  /// No persistent schedule inside the same budget is faster by more than this; 0: none is faster.
  /// Meaningless for fixed policies.
  std::int64_t certified_gap_ns = 0;
};

/// Forward runs beyond the first of each stage, in nanoseconds and as a fraction of one forward of
/// the chain.
struct Recompute {
  std::int64_t num_runs = 0;
  std::int64_t time_ns = 0;
  double fraction = 0;
};
Recompute recompute_of(const ChainCosts& chain, const std::vector<Operation>& operations);

/// One point of the memory/time curve: the smallest budget at which `time_ns` can be had.
struct FrontierPoint {
  std::int64_t budget_bytes = 0;
  std::int64_t time_ns = 0;
  std::int64_t peak_bytes = 0;
};

}  // namespace headroom
