#pragma once

#include <headroom/config/chain_costs.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// What one step of a schedule does. Stages count from 0. Stage l reads boundary l and makes
/// boundary l + 1: boundary 0 is the chain's input, the last one the loss. Three things can hold a
/// boundary: the chain itself (boundary 0, for ever), the stage that made it (a kept stage keeps
/// its output), or a slot of its own (stored, in some format). A boundary that nothing holds yet is
/// the *head*: the output of the forward before, alive until the next operation takes it. There is
/// at most one head, and the operation after it runs the stage that reads it.
enum class OperationKind {
  /// Runs the stage forward without autograd, keeping nothing: reads its input, makes its output
  /// the
  /// head. An input that was the head is dropped after the run; one that is held stays.
  kForward,
  /// First puts the head, its input, into a slot, in `format`; then like kForward. With a format
  /// other than full the run reads the decoded value, not the head from which it was encoded, so
  /// that a later recompute sees the same numbers. (A boundary that something holds already stays
  /// as
  /// it is; plans do not ask for that.)
  kForwardStore,
  /// Runs the stage forward with autograd, in the way of `option`. If its input is the head, it is
  /// put into a slot first, in `format`, as above. Live afterwards are its input, wherever it is
  /// held, and what the option keeps, its output included. There is no head afterwards.
  kForwardKeep,
  /// Runs the stage backward: consumes the gradient of its output and what it kept, both freed
  /// afterwards; leaves the gradient of its input and the gradients of its parameters. For the last
  /// stage the gradient of the output is the implicit 1 of the loss.
  kBackward,
  /// Drops the stage's input from its slot. Comes right after the backward of the stage, when its
  /// input is neither the chain's nor part of what the stage before kept.
  kFree,
};

/// "forward", "forward_store", "forward_keep", "backward" or "free".
const char* operation_name(OperationKind kind);

struct Operation {
  OperationKind kind = OperationKind::kForward;
  int stage = 0;
  int option = 0;  ///< of kForwardKeep and kBackward: index into the stage's options
  /// How the stage's input is held: 0 is full (as it is), i > 0 is boundary_formats[i - 1]. Every
  /// operation that reads a boundary stored in another format than full decodes it into a temporary
  /// of its own, backward included.
  int format = 0;
  /// The stage's input, in another format than full, is in memory when the operation begins: it
  /// stayed there from the operation before (kFree aside), or came while that one ran.
  bool finds_input = false;

  bool operator==(const Operation& other) const {
    return kind == other.kind && stage == other.stage && option == other.option &&
           format == other.format && finds_input == other.finds_input;
  }
};

/// The bytes around one operation, and its time: everything but the chain's input, as the model
/// counts them.
struct OperationBytes {
  std::int64_t peak_bytes = 0;  ///< during the operation
  std::int64_t live_bytes = 0;  ///< after it
  std::int64_t ns = 0;          ///< that it takes
};

/// A schedule for one micro-batch, and what it is predicted to cost.
struct Schedule {
  std::vector<Operation> operations;
  std::int64_t time_ns = 0;
  std::int64_t peak_bytes = 0;
  std::size_t peak_operation = 0;     ///< index of the first operation that reaches the peak
  std::vector<OperationBytes> curve;  ///< one entry per operation
  /// No persistent schedule inside the same budget is faster by more than this, operations that
  /// find their input aside; 0: none is faster. Meaningless for fixed policies.
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

enum class PolicyKind {
  kOptimal,   ///< the fastest plan that fits, by ChainSolver
  kNone,      ///< keeps everything
  kEvery,     ///< keeps every boundary, recomputes every stage but the last
  kSegments,  ///< keeps the boundaries of K segments of equal size, or by one stage larger, as
              ///< checkpoint_sequential cuts them; recomputes all but the last segment
  kSqrt,      ///< kSegments with K = round(sqrt(number of stages))
  kLog,      ///< halves recursively: about log2(n) boundaries at a time, log2(n) / 2 extra forwards
  kRevolve,  ///< C snapshots, placed binomially: the fewest extra forwards for equal stages
};

struct Policy {
  PolicyKind kind = PolicyKind::kOptimal;
  int count = 0;  ///< K of segments, C of revolve

  /// As it was written: "segments=4".
  std::string to_string() const;
};

/// Reads "optimal", "none", "every", "segments=K", "sqrt", "log" or "revolve=C" with K, C >= 1.
/// Throws ConfigError, listing them, on anything else.
Policy parse_policy(std::string_view text);

/// The plan of a fixed policy, with the first option of each stage and boundaries held as they are.
/// It knows no budget: compare its peak_bytes. Throws ConfigError when the policy does not suit the
/// chain (more segments than stages) and std::invalid_argument for kOptimal, which needs one.
Schedule schedule_of_policy(const ChainCosts& chain, const Policy& policy);

}  // namespace headroom
