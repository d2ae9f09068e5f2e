#include "plan/simulate.h"

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
        kept_(chain.stages.size() + 1, kNothing),
        stored_(chain.stages.size() + 1, kNothing),
        held_bytes_(chain.stages.size() + 1, 0),
        gradient_(num_stages_) {
    live_bytes_ = gradient_bytes(num_stages_);
  }

  std::int64_t step(const Operation& operation) {
    require(operation.stage >= 1 && operation.stage <= num_stages_, "there is no such stage");
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
    require(gradient_ == 0, "the list ends before the backward of stage 1");
    require(head_ == kNothing, "the list ends with an unused forward");
    for (int l = 1; l <= num_stages_; ++l)
      require(kept_[index(l)] == kNothing && stored_[index(l)] == kNothing,
              "the list leaves a boundary held");
  }

  std::int64_t live_bytes() const { return live_bytes_; }
  std::int64_t time_ns() const { return time_ns_; }

 private:
  static std::size_t index(int l) { return static_cast<std::size_t>(l); }
  static void require(bool condition, const char* problem) {
    if (!condition) throw Refusal{problem};
  }

  const StageCosts& stage(int l) const { return chain_.stages[index(l - 1)]; }
  std::int64_t output_bytes(int l) const { return l == 0 ? 0 : stage(l).output_bytes; }
  std::int64_t gradient_bytes(int l) const {
    return l == 0 ? chain_.input_grad_bytes : stage(l).grad_bytes;
  }
  std::int64_t stored_bytes(int l, int format) const {
    return format == 0 ? output_bytes(l)
                       : chain_.boundary_formats[index(format - 1)].stored_bytes(output_bytes(l));
  }

  std::int64_t carried_bytes(int l) const {
    std::int64_t bytes = 0;
    for (const CarriedBytes& part : stage(l).carried) bytes += part.bytes;
    return bytes;
  }

  /// In which a_l is held; it must be.
  int format_of(int l) const {
    return l == 0 || kept_[index(l)] != kNothing ? 0 : stored_[index(l)];
  }

  /// Bytes that the output of stage l adds as the head: what it carries of the nearest boundary
  /// that is held below it is there already, unless that boundary is in another format.
  std::int64_t added_bytes(int l) const {
    int below = l - 1;
    while (!held(below)) --below;
    std::int64_t bytes = output_bytes(l);
    if (format_of(below) != 0) return bytes;
    for (const CarriedBytes& part : stage(l).carried) {
      if (l - part.stages_back <= below) bytes -= part.bytes;
    }
    return bytes;
  }

  bool held(int l) const {
    return l == 0 || kept_[index(l)] != kNothing || stored_[index(l)] != kNothing;
  }

  /// Puts the head into a slot, unless the boundary is held already.
  std::int64_t hold_input(const Operation& operation) {
    const int input = operation.stage - 1;
    if (held(input)) {
      require(format_of(input) == operation.format, "its input is held in another format");
      return live_bytes_;
    }
    require(head_ == input, "its input is not in memory");
    head_ = kNothing;
    stored_[index(input)] = operation.format;
    if (operation.format == 0) return live_bytes_;
    const std::int64_t bytes = stored_bytes(input, operation.format);
    const std::int64_t peak = live_bytes_ + bytes;
    live_bytes_ += bytes - std::exchange(held_bytes_[index(input)], bytes);
    time_ns_ += chain_.boundary_formats[index(operation.format - 1)].encode_ns(output_bytes(input));
    return peak;
  }

  /// Bytes of the temporary that a run of stage l needs to read its input, whose time it charges.
  std::int64_t decode_input(int l) {
    const int input = l - 1;
    if (input == 0 || kept_[index(input)] != kNothing || stored_[index(input)] <= 0) return 0;
    time_ns_ +=
        chain_.boundary_formats[index(stored_[index(input)] - 1)].decode_ns(output_bytes(input));
    return output_bytes(input);
  }

  std::int64_t forward(int l) {
    const int input = l - 1;
    require(held(input) || head_ == input, "its input is not in memory");
    require(head_ == kNothing || head_ == input, "it leaves the forward before unused");
    require(!held(l), "its output is held already");
    const std::int64_t peak = live_bytes_ + decode_input(l) + output_bytes(l) - carried_bytes(l) +
                              stage(l).forward_transient_bytes;
    if (head_ == input) live_bytes_ -= held_bytes_[index(input)];
    held_bytes_[index(l)] = added_bytes(l);
    live_bytes_ += held_bytes_[index(l)];
    head_ = l;
    time_ns_ += stage(l).forward_ns;
    return peak;
  }

  std::int64_t forward_keep(const Operation& operation) {
    const int l = operation.stage;
    require(head_ == kNothing, "it leaves the forward before unused");
    require(!held(l), "its output is held already");
    require(operation.option >= 0 && index(operation.option) < stage(l).options.size(),
            "there is no such option");
    const StageOption& option = stage(l).options[index(operation.option)];
    held_bytes_[index(l)] = option.kept_bytes + (format_of(l - 1) == 0 ? 0 : carried_bytes(l));
    const std::int64_t peak =
        live_bytes_ + decode_input(l) + held_bytes_[index(l)] + option.forward_transient_bytes;
    live_bytes_ += held_bytes_[index(l)];
    kept_[index(l)] = operation.option;
    time_ns_ += option.forward_ns;
    return peak;
  }

  std::int64_t backward(int l) {
    require(gradient_ == l, "the gradient of its output is not there");
    require(kept_[index(l)] != kNothing, "nothing was kept for it");
    require(held(l - 1), "its input is not in memory");
    require(head_ == kNothing, "it leaves the forward before unused");
    const StageOption& option = stage(l).options[index(kept_[index(l)])];
    const std::int64_t carried = stage(l).carried_grad_bytes;
    const std::int64_t appears = gradient_bytes(l - 1) - carried + stage(l).param_grad_bytes;
    const std::int64_t peak =
        live_bytes_ + decode_input(l) + appears + option.backward_transient_bytes;
    live_bytes_ += appears - (gradient_bytes(l) - carried) - held_bytes_[index(l)];
    kept_[index(l)] = kNothing;
    gradient_ = l - 1;
    time_ns_ += option.backward_ns;
    return peak;
  }

  std::int64_t free_input(int l) {
    require(gradient_ < l, "its backward has not run");
    require(l > 1 && stored_[index(l - 1)] != kNothing, "its input has no slot of its own");
    const std::int64_t peak = live_bytes_;
    live_bytes_ -= held_bytes_[index(l - 1)];
    stored_[index(l - 1)] = kNothing;
    return peak;
  }

  const ChainCosts& chain_;
  int num_stages_;
  std::vector<int> kept_;                 ///< option with which stage l is kept
  std::vector<int> stored_;               ///< format in which a_l has a slot of its own
  std::vector<std::int64_t> held_bytes_;  ///< that a_l adds as head, in its slot or kept
  int head_ = kNothing;
  int gradient_;  ///< the gradient of this boundary is in memory
  std::int64_t live_bytes_ = 0;
  std::int64_t time_ns_ = 0;
};

}  // namespace

Replay simulate(const ChainCosts& chain, const std::vector<Operation>& operations) {
  validate(chain);
  Replay replay;
  ChainState state(chain);
  replay.curve.reserve(operations.size());
  std::size_t position = 0;
  try {
    for (; position < operations.size(); ++position) {
      const std::int64_t peak_bytes = state.step(operations[position]);
      if (position == 0 || peak_bytes > replay.peak_bytes) {
        replay.peak_bytes = peak_bytes;
        replay.peak_operation = position;
      }
      replay.curve.push_back({peak_bytes, state.live_bytes()});
    }
    state.require_done();
  } catch (const Refusal& refusal) {
    replay.problem = position < operations.size()
                         ? fmt::format("operation {} ({} of stage {}): {}", position,
                                       operation_name(operations[position].kind),
                                       operations[position].stage, refusal.problem)
                         : refusal.problem;
  }
  replay.time_ns = state.time_ns();
  return replay;
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
