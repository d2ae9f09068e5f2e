#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/plan/schedule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace headroom::testing {

/// Finds the fastest persistent schedule by brute force: Dijkstra over everything that can be in
/// memory. Written from the definition of the problem alone, in the symbols of docs/planning.md,
/// whose stages count from 1; it shares no code with the planner.
/// For chains of up to 6 stages, 3 options and 2 formats beside full.
class Oracle {
 public:
  static constexpr std::int64_t kInfeasible = -1;

  explicit Oracle(const ChainCosts& chain)
      : chain_(chain), num_stages_(static_cast<int>(chain.stages.size())) {}

  /// Time of the fastest schedule whose every moment stays within the budget, or kInfeasible.
  std::int64_t solve(std::int64_t budget_bytes) {
    using Entry = std::pair<std::int64_t, std::uint32_t>;
    std::vector<std::int64_t> best(std::size_t{8} << (3 * num_stages_),
                                   std::numeric_limits<std::int64_t>::max());
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    const std::uint32_t start = static_cast<std::uint32_t>(num_stages_);
    best[start] = 0;
    queue.emplace(0, start);
    while (!queue.empty()) {
      const auto [time, state] = queue.top();
      queue.pop();
      if (time > best[state]) continue;
      if (gradient(state) == 0) return time;
      for (const Move& move : moves(state)) {
        if (move.peak_bytes > budget_bytes || time + move.time_ns >= best[move.next]) continue;
        best[move.next] = time + move.time_ns;
        queue.emplace(best[move.next], move.next);
      }
    }
    return kInfeasible;
  }

  struct Cost {
    bool valid = false;
    std::int64_t time_ns = 0;
    std::int64_t peak_bytes = 0;
  };

  /// Follows a planner's list of operations, move by move.
  Cost replay(const std::vector<Operation>& operations) const {
    Cost cost;
    std::uint32_t state = static_cast<std::uint32_t>(num_stages_);
    for (const Operation& operation : operations) {
      // Here backward frees its input at once, so that "free" has nothing left to do.
      if (operation.kind == OperationKind::kFree) continue;
      const bool found_head = operation.stage > 0 && kind(state, operation.stage) == kHead;
      bool found = false;
      for (const Move& move : moves(state)) {
        if (move.stage != operation.stage + 1) continue;
        bool same = false;
        if (operation.kind == OperationKind::kForward)
          same = move.type == Type::kRun && move.store < 0;
        if (operation.kind == OperationKind::kForwardStore)
          same = move.type == Type::kRun && move.store == (found_head ? operation.format : -1);
        if (operation.kind == OperationKind::kForwardKeep) {
          same = move.type == Type::kKeep && move.option == operation.option &&
                 move.store == (found_head ? operation.format : -1);
        }
        if (operation.kind == OperationKind::kBackward) same = move.type == Type::kBack;
        if (!same) continue;
        cost.time_ns += move.time_ns;
        cost.peak_bytes = std::max(cost.peak_bytes, move.peak_bytes);
        state = move.next;
        found = true;
        break;
      }
      if (!found) return cost;
    }
    cost.valid = state == 0;
    return cost;
  }

 private:
  // A boundary is absent, the transient head, retained in one of three formats, or part of a stage
  // kept with one of three options.
  static constexpr int kAbsent = 0, kHead = 1, kRetained = 2, kKept = 5;
  enum class Type { kRun, kKeep, kBack };
  struct Move {
    Type type;
    int stage;
    int option;
    int store;  ///< format into which the head goes first, or -1
    std::int64_t time_ns;
    std::int64_t peak_bytes;
    std::uint32_t next;
  };

  // State: three bits of gradient index, then three bits per boundary 1..L.
  static int gradient(std::uint32_t state) { return static_cast<int>(state & 7U); }
  static int kind(std::uint32_t state, int l) { return static_cast<int>((state >> (3 * l)) & 7U); }
  static std::uint32_t with(std::uint32_t state, int l, int value) {
    return (state & ~(7U << (3 * l))) | (static_cast<std::uint32_t>(value) << (3 * l));
  }

  const StageCosts& stage(int l) const { return chain_.stages[static_cast<std::size_t>(l - 1)]; }
  std::int64_t out(int l) const { return l == 0 ? 0 : stage(l).output_bytes; }
  std::int64_t carried(int l) const {
    std::int64_t bytes = 0;
    for (const CarriedBytes& part : stage(l).carried) bytes += part.bytes;
    return bytes;
  }
  /// What of a_l is there already, because the nearest boundary below that is in memory holds it.
  std::int64_t shared(std::uint32_t state, int l) const {
    int below = l - 1;
    while (below > 0 && kind(state, below) == kAbsent) --below;
    const int k = below == 0 ? kKept : kind(state, below);
    if (k > kRetained && k < kKept) return 0;
    std::int64_t bytes = 0;
    for (const CarriedBytes& part : stage(l).carried)
      bytes += l - part.stages_back <= below ? part.bytes : 0;
    return bytes;
  }
  std::int64_t grad(int l) const { return l == 0 ? chain_.input_grad_bytes : stage(l).grad_bytes; }
  const BoundaryFormat& format(int q) const {
    return chain_.boundary_formats[static_cast<std::size_t>(q - 1)];
  }
  /// The parts of a_l that the nearest boundary below holds in format q as well.
  std::vector<std::int64_t> packed_below(std::uint32_t state, int l, int q) const {
    int below = l - 1;
    while (below > 0 && kind(state, below) == kAbsent) --below;
    std::vector<std::int64_t> parts;
    if (below == 0 || kind(state, below) != kRetained + q) return parts;
    for (const CarriedBytes& part : stage(l).carried) {
      if (l - part.stages_back <= below) parts.push_back(part.bytes);
    }
    return parts;
  }
  std::int64_t packed(std::uint32_t state, int l, int q) const {
    if (q == 0) return out(l);
    auto bytes =
        static_cast<std::int64_t>(std::ceil(format(q).size_ratio * static_cast<double>(out(l))));
    for (const std::int64_t part : packed_below(state, l, q))
      bytes -=
          static_cast<std::int64_t>(std::floor(format(q).size_ratio * static_cast<double>(part)));
    return bytes;
  }
  std::int64_t packing(std::uint32_t state, int l, int q) const {
    if (q == 0) return 0;
    std::int64_t bytes = out(l);
    for (const std::int64_t part : packed_below(state, l, q)) bytes -= part;
    return std::llround(format(q).encode_ns_per_byte * static_cast<double>(bytes));
  }
  std::int64_t unpacking(int l, int q) const {
    return q == 0 ? 0 : std::llround(format(q).decode_ns_per_byte * static_cast<double>(out(l)));
  }

  std::int64_t live(std::uint32_t state) const {
    std::int64_t bytes = grad(gradient(state));
    for (int l = gradient(state) + 1; l <= num_stages_; ++l) bytes += stage(l).param_grad_bytes;
    for (int l = 1; l <= num_stages_; ++l) {
      const int k = kind(state, l);
      if (k == kHead || k == kRetained) bytes += out(l) - shared(state, l);
      if (k > kRetained && k < kKept) bytes += packed(state, l, k - kRetained);
      if (k >= kKept) {
        bytes += stage(l).options[static_cast<std::size_t>(k - kKept)].kept_bytes + carried(l) -
                 shared(state, l);
      }
    }
    return bytes;
  }

  std::vector<Move> moves(std::uint32_t state) const {
    std::vector<Move> result;
    int head = 0;
    for (int l = 1; l <= num_stages_; ++l) {
      if (kind(state, l) == kHead) head = l;
    }
    for (int i = 1; i <= gradient(state); ++i) {
      if (head != 0 && i != head + 1) continue;
      const int input = i == 1 ? kKept : kind(state, i - 1);
      if (input == kAbsent) continue;
      if (kind(state, i) == kAbsent) add_forwards(result, state, i, input);
      if (i == gradient(state) && kind(state, i) >= kKept && input != kHead)
        add_backward(result, state, i, input);
    }
    return result;
  }

  void add_forwards(std::vector<Move>& result, std::uint32_t state, int i, int input) const {
    if (input != kHead) {
      const int q = input >= kKept ? 0 : input - kRetained;
      add_runs(result, state, i, q, -1, 0, live(state), true);
      return;
    }
    // The head is used up by a sweep, or retained in some format first.
    add_runs(result, state, i, 0, -1, 0, live(state), false);
    for (int q = 0; q <= static_cast<int>(chain_.boundary_formats.size()); ++q) {
      const std::int64_t peak = live(state) + (q == 0 ? 0 : packed(state, i - 1, q));
      add_runs(result, with(state, i - 1, kRetained + q), i, q, q, packing(state, i - 1, q), peak,
               true);
    }
  }

  /// All ways to run stage i forward in `state`, its input being in format q.
  void add_runs(std::vector<Move>& result, std::uint32_t state, int i, int q, int store,
                std::int64_t time_before, std::int64_t peak_before, bool input_stays) const {
    const std::int64_t base = live(state) + (q == 0 ? 0 : out(i - 1));
    const std::int64_t time = time_before + unpacking(i - 1, q);
    const std::uint32_t after = input_stays ? state : with(state, i - 1, kAbsent);
    if (store != 0 || q == 0) {
      result.push_back(
          {Type::kRun, i, 0, store, time + stage(i).forward_ns,
           std::max(peak_before, base + out(i) - carried(i) + stage(i).forward_transient_bytes),
           with(after, i, kHead)});
    }
    if (!input_stays) return;
    for (int k = 0; k < static_cast<int>(stage(i).options.size()); ++k) {
      const StageOption& option = stage(i).options[static_cast<std::size_t>(k)];
      result.push_back({Type::kKeep, i, k, store, time + option.forward_ns,
                        std::max(peak_before, base + option.kept_bytes + (q == 0 ? 0 : carried(i)) +
                                                  option.forward_transient_bytes),
                        with(after, i, kKept + k)});
    }
  }

  void add_backward(std::vector<Move>& result, std::uint32_t state, int i, int input) const {
    const StageOption& option = stage(i).options[static_cast<std::size_t>(kind(state, i) - kKept)];
    const int q = input >= kKept ? 0 : input - kRetained;
    const std::int64_t peak = live(state) + grad(i - 1) - stage(i).carried_grad_bytes +
                              stage(i).param_grad_bytes + option.backward_transient_bytes +
                              (q == 0 ? 0 : out(i - 1));
    std::uint32_t next = with(state, i, kAbsent);
    if (i > 1 && input < kKept) next = with(next, i - 1, kAbsent);
    next = (next & ~7U) | static_cast<std::uint32_t>(i - 1);
    result.push_back({Type::kBack, i, kind(state, i) - kKept, -1,
                      option.backward_ns + unpacking(i - 1, q), peak, next});
  }

  const ChainCosts& chain_;
  int num_stages_;
};

}  // namespace headroom::testing
