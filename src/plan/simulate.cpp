#include "plan/simulate.h"

#include "plan/intervals.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace headroom {
namespace {

constexpr int kNothing = -1;

/// Why an operation cannot be carried out.
struct Refusal {
  const char* problem;
};

/// The state of a chain between two operations. Every step returns the peak during it, or throws
/// Refusal.
class ChainState {
 public:
  explicit ChainState(const ChainCosts& chain)
      : chain_(chain),
        num_stages_(static_cast<int>(chain.stages.size())),
        kept_(chain.stages.size(), kNothing),
        stored_(chain.stages.size() + 1, kNothing),
        held_bytes_(chain.stages.size() + 1, 0),
        gradient_(num_stages_) {
    live_bytes_ = gradient_bytes(num_stages_);
  }

  std::int64_t step(const Operation& operation) {
    require(operation.stage >= 0 && operation.stage < num_stages_, "there is no such stage");
    require(operation.format >= 0 &&
                operation.format <= static_cast<int>(chain_.boundary_formats.size()),
            "there is no such format");
    switch (operation.kind) {
      case OperationKind::kForward:
        return forward(operation.stage);
      case OperationKind::kForwardStore:
      case OperationKind::kForwardKeep: {
        const std::int64_t hold_peak = hold_input(operation);
        return std::max(hold_peak, operation.kind == OperationKind::kForwardStore
                                       ? forward(operation.stage)
                                       : forward_keep(operation));
      }
      case OperationKind::kBackward:
        return backward(operation.stage);
      case OperationKind::kFree:
        return free_input(operation.stage);
    }
    throw Refusal{"unknown operation"};
  }

  void require_done() const {
    require(gradient_ == 0, "the list ends before the backward of the first stage");
    require(head_ == kNothing, "the list ends with an unused forward");
    for (int boundary = 1; boundary <= num_stages_; ++boundary)
      require(!held(boundary), "the list leaves a boundary held");
  }

  std::int64_t live_bytes() const { return live_bytes_; }
  std::int64_t time_ns() const { return time_ns_; }

 private:
  static std::size_t index(int l) { return static_cast<std::size_t>(l); }
  static void require(bool condition, const char* problem) {
    if (!condition) throw Refusal{problem};
  }

  const StageCosts& stage(int l) const { return chain_.stages[index(l)]; }
  std::int64_t boundary_bytes(int boundary) const {
    return boundary == 0 ? 0 : stage(boundary - 1).output_bytes;
  }
  std::int64_t gradient_bytes(int boundary) const {
    return boundary == 0 ? chain_.input_grad_bytes : stage(boundary - 1).grad_bytes;
  }
  const BoundaryFormat& boundary_format(int format) const {
    return chain_.boundary_formats[index(format - 1)];
  }

  std::int64_t carried_bytes(int l) const {
    std::int64_t bytes = 0;
    for (const CarriedBytes& part : stage(l).carried) bytes += part.bytes;
    return bytes;
  }

  /// Whether a boundary stays where it is: the chain's input, or a part of what its stage kept.
  bool part_of_kept(int boundary) const {
    return boundary == 0 || kept_[index(boundary - 1)] != kNothing;
  }
  bool held(int boundary) const {
    return part_of_kept(boundary) || stored_[index(boundary)] != kNothing;
  }
  /// In which a boundary is held; it must be.
  int format_of(int boundary) const {
    return part_of_kept(boundary) ? 0 : stored_[index(boundary)];
  }

  /// The nearest boundary below that is held.
  int held_below(int boundary) const {
    int below = boundary - 1;
    while (!held(below)) --below;
    return below;
  }

  /// Bytes that the output of stage l adds as the head: what it carries of the nearest boundary
  /// that is held below it is there already, unless that boundary is in another format.
  std::int64_t added_bytes(int l) const {
    const int below = held_below(l + 1);
    std::int64_t bytes = stage(l).output_bytes;
    if (format_of(below) != 0) return bytes;
    for (const CarriedBytes& part : stage(l).carried) {
      if (l + 1 - part.stages_back <= below) bytes -= part.bytes;
    }
    return bytes;
  }

  /// Puts the head into a slot, unless the boundary is held already.
  std::int64_t hold_input(const Operation& operation) {
    const int input = operation.stage;
    if (held(input)) {
      require(format_of(input) == operation.format, "its input is held in another format");
      return live_bytes_;
    }
    require(head_ == input, "its input is not in memory");
    head_ = kNothing;
    stored_[index(input)] = operation.format;
    if (operation.format == 0) return live_bytes_;
    const BoundaryFormat& format = boundary_format(operation.format);
    std::int64_t bytes = format.stored_bytes(boundary_bytes(input));
    std::int64_t new_bytes = boundary_bytes(input);
    const int below = held_below(input);
    if (format_of(below) == operation.format) {
      for (const CarriedBytes& part : stage(input - 1).carried) {
        if (input - part.stages_back > below) continue;
        bytes -= shared_bytes(format, part.bytes);
        new_bytes -= part.bytes;
      }
    }
    const std::int64_t peak = live_bytes_ + bytes;
    live_bytes_ += bytes - std::exchange(held_bytes_[index(input)], bytes);
    time_ns_ += format.encode_ns(new_bytes, stage(input).forward_ns);
    return peak;
  }

  /// Bytes of the temporary that a run of stage l needs to read its input, whose time it charges.
  std::int64_t decode_input(int l) {
    if (part_of_kept(l) || stored_[index(l)] <= 0) return 0;
    time_ns_ += boundary_format(stored_[index(l)]).decode_ns(boundary_bytes(l));
    return boundary_bytes(l);
  }

  std::int64_t forward(int l) {
    const int input = l, output = l + 1;
    require(held(input) || head_ == input, "its input is not in memory");
    require(head_ == kNothing || head_ == input, "it leaves the forward before unused");
    require(!held(output), "its output is held already");
    const std::int64_t peak = live_bytes_ + decode_input(l) + stage(l).output_bytes -
                              carried_bytes(l) + stage(l).forward_transient_bytes;
    if (head_ == input) live_bytes_ -= held_bytes_[index(input)];
    held_bytes_[index(output)] = added_bytes(l);
    live_bytes_ += held_bytes_[index(output)];
    head_ = output;
    time_ns_ += stage(l).forward_ns;
    return peak;
  }

  std::int64_t forward_keep(const Operation& operation) {
    const int l = operation.stage;
    require(head_ == kNothing, "it leaves the forward before unused");
    require(!held(l + 1), "its output is held already");
    require(operation.option >= 0 && index(operation.option) < stage(l).options.size(),
            "there is no such option");
    const StageOption& option = stage(l).options[index(operation.option)];
    const std::int64_t bytes = option.kept_bytes + (format_of(l) == 0 ? 0 : carried_bytes(l));
    const std::int64_t peak =
        live_bytes_ + decode_input(l) + bytes + option.forward_transient_bytes;
    held_bytes_[index(l + 1)] = bytes;
    live_bytes_ += bytes;
    kept_[index(l)] = operation.option;
    time_ns_ += option.forward_ns;
    return peak;
  }

  std::int64_t backward(int l) {
    require(gradient_ == l + 1, "the gradient of its output is not there");
    require(kept_[index(l)] != kNothing, "nothing was kept for it");
    require(held(l), "its input is not in memory");
    require(head_ == kNothing, "it leaves the forward before unused");
    const StageOption& option = stage(l).options[index(kept_[index(l)])];
    const std::int64_t carried = stage(l).carried_grad_bytes;
    const std::int64_t appears = gradient_bytes(l) - carried + stage(l).param_grad_bytes;
    const std::int64_t peak =
        live_bytes_ + decode_input(l) + appears + option.backward_transient_bytes;
    live_bytes_ += appears - (gradient_bytes(l + 1) - carried) - held_bytes_[index(l + 1)];
    kept_[index(l)] = kNothing;
    gradient_ = l;
    time_ns_ += option.backward_ns;
    return peak;
  }

  std::int64_t free_input(int l) {
    require(gradient_ <= l, "its backward has not run");
    require(l > 0 && stored_[index(l)] != kNothing, "its input has no slot of its own");
    const std::int64_t peak = live_bytes_;
    live_bytes_ -= held_bytes_[index(l)];
    stored_[index(l)] = kNothing;
    return peak;
  }

  const ChainCosts& chain_;
  int num_stages_;
  std::vector<int> kept_;                 ///< option with which stage l is kept
  std::vector<int> stored_;               ///< format in which a boundary has a slot of its own
  std::vector<std::int64_t> held_bytes_;  ///< that a boundary adds as head, in its slot or kept
  int head_ = kNothing;                   ///< a boundary
  int gradient_;                          ///< the gradient of this boundary is in memory
  std::int64_t live_bytes_ = 0;
  std::int64_t time_ns_ = 0;
};

// The operation that an operation finds its input from; null: there is none.
const Operation* operation_before(const std::vector<Operation>& operations, std::size_t index) {
  while (index-- > 0) {
    if (operations[index].kind != OperationKind::kFree) return &operations[index];
  }
  return nullptr;
}

// What it takes that `operation` finds its input, which is in another format than full, after
// `before` of `before_ns`.
struct FoundInput {
  std::int64_t bytes = 0;      // while `before` runs, above what it needs
  std::int64_t hidden_ns = 0;  // of decoding
};

FoundInput found_input(const ChainCosts& chain, const Operation& before, std::int64_t before_ns,
                       const Operation& operation) {
  const auto boundary = static_cast<std::size_t>(operation.stage);
  const BoundaryFormat& format =
      chain.boundary_formats[static_cast<std::size_t>(operation.format - 1)];
  const std::int64_t bytes = chain.stages[boundary - 1].output_bytes;
  const std::int64_t decode_ns = format.decode_ns(bytes);
  const bool reads_the_same =
      before.stage == operation.stage && before.kind == OperationKind::kForwardKeep;
  const bool is_head =
      before.stage + 1 == operation.stage &&
      (before.kind == OperationKind::kForward || before.kind == OperationKind::kForwardStore);
  if (reads_the_same || is_head) return {0, decode_ns};
  const auto overlapped = static_cast<std::int64_t>(std::min(format.decode_overlap, 1.0) *
                                                    static_cast<double>(before_ns));
  return {bytes, std::min(decode_ns, overlapped)};
}

bool is_decoded_beside(const ChainCosts& chain, const Operation& operation) {
  return operation.kind != OperationKind::kFree && operation.stage > 0 && operation.format > 0 &&
         operation.format <= static_cast<int>(chain.boundary_formats.size()) &&
         chain.boundary_formats[static_cast<std::size_t>(operation.format - 1)].decode_overlap > 0;
}

}  // namespace

Replay simulate(const ChainCosts& chain, const std::vector<Operation>& operations) {
  validate(chain);
  Replay replay;
  ChainState state(chain);
  replay.curve.reserve(operations.size());
  std::size_t position = 0, before = 0;
  std::int64_t hidden_ns = 0;
  try {
    for (; position < operations.size(); ++position) {
      const Operation& operation = operations[position];
      const std::int64_t start_ns = state.time_ns();
      const std::int64_t peak_bytes = state.step(operation);
      std::int64_t ns = state.time_ns() - start_ns;
      if (operation.finds_input && position > 0 && is_decoded_beside(chain, operation)) {
        const FoundInput found =
            found_input(chain, operations[before], replay.curve[before].ns, operation);
        for (std::size_t i = before; i < position; ++i) {
          replay.curve[i].peak_bytes += found.bytes;
          replay.curve[i].live_bytes += found.bytes;
        }
        ns -= found.hidden_ns;
        hidden_ns += found.hidden_ns;
      }
      replay.curve.push_back({peak_bytes, state.live_bytes(), ns});
      if (operation.kind != OperationKind::kFree) before = position;
    }
    state.require_done();
  } catch (const Refusal& refusal) {
    replay.problem = position < operations.size()
                         ? fmt::format("operation {} ({} of stage {}): {}", position,
                                       operation_name(operations[position].kind),
                                       operations[position].stage, refusal.problem)
                         : refusal.problem;
  }
  for (std::size_t i = 0; i < replay.curve.size(); ++i) {
    if (i > 0 && replay.curve[i].peak_bytes <= replay.peak_bytes) continue;
    replay.peak_bytes = replay.curve[i].peak_bytes;
    replay.peak_operation = i;
  }
  replay.time_ns = state.time_ns() - hidden_ns;
  return replay;
}

Schedule with_found_inputs(const ChainCosts& chain, Schedule plan, std::int64_t budget_bytes) {
  std::vector<Operation> operations = plan.operations;
  bool is_changed = false;
  for (std::size_t i = 1; i < operations.size(); ++i) {
    if (!is_decoded_beside(chain, operations[i])) continue;
    const Operation* before = operation_before(operations, i);
    const auto at = static_cast<std::size_t>(before - operations.data());
    const std::int64_t bytes = found_input(chain, *before, plan.curve[at].ns, operations[i]).bytes;
    if (plan.curve[at].peak_bytes + bytes > budget_bytes) continue;
    operations[i].finds_input = is_changed = true;
  }
  if (!is_changed) return plan;
  const std::int64_t gap_ns = plan.certified_gap_ns;
  plan = schedule_from_operations(chain, std::move(operations));
  plan.certified_gap_ns = gap_ns;
  return plan;
}

Schedule schedule_from_operations(const ChainCosts& chain, std::vector<Operation> operations) {
  Replay replay = simulate(chain, operations);
  if (!replay.valid()) throw std::logic_error("invalid schedule: " + replay.problem);
  Schedule plan;
  plan.operations = std::move(operations);
  plan.time_ns = replay.time_ns;
  plan.peak_bytes = replay.peak_bytes;
  plan.peak_operation = replay.peak_operation;
  plan.curve = std::move(replay.curve);
  return plan;
}

}  // namespace headroom
