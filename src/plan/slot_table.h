#pragma once

#include "plan/expansion.h"
#include "plan/intervals.h"

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace headroom {

/// How bytes of memory become indices: index i stands for residue + i * slot bytes. Needs are
/// compared in exact bytes; what an operation takes away for the rest of its interval is rounded to
/// whole slots, up (a plan that fits) or down (a bound on its time).
struct Grid {
  std::int64_t slot_bytes = 1;
  std::int64_t residue_bytes = 0;
  std::int64_t top = 0;  ///< largest index
  bool round_up = true;

  std::int64_t units(std::int64_t bytes) const {
    if (bytes == 0 || slot_bytes == 1) return bytes;
    return (round_up ? bytes + slot_bytes - 1 : bytes) / slot_bytes;
  }
  /// The smallest index with at least that many bytes.
  std::int64_t index_of_need(std::int64_t bytes) const {
    if (bytes <= residue_bytes) return 0;
    return slot_bytes == 1 ? bytes - residue_bytes
                           : (bytes - residue_bytes + slot_bytes - 1) / slot_bytes;
  }
  std::int64_t index_of_budget(std::int64_t bytes) const {
    return bytes < residue_bytes ? -1 : (bytes - residue_bytes) / slot_bytes;
  }
  std::int64_t bytes(std::int64_t index) const { return residue_bytes + index * slot_bytes; }
};

/// C(first, last, format, m) of every interval, for all m of a grid.
class SlotTable {
 public:
  SlotTable(const ChainNumbers& numbers, const Intervals& intervals, const Grid& grid, bool prune);

  const Grid& grid() const { return grid_; }
  /// Whether the whole chain fits at this index, and then its time.
  bool feasible(std::int64_t index) const { return index >= chain_row().lo; }
  std::int64_t time_ns(std::int64_t index) const { return chain_row().at(index); }
  /// The indices at which the time of the whole chain changes, in ascending order.
  std::vector<std::int64_t> steps() const;
  /// The operations of a fastest schedule at a feasible index. Of equal ones: keeping before
  /// sweeping, then the lowest numbers.
  std::vector<Operation> extract(std::int64_t index) const;

 private:
  /// Times for indices lo..hi; infeasible below, constant above.
  struct Row {
    std::int64_t lo = 0;
    std::int64_t hi = 0;
    const std::int64_t* values = nullptr;

    std::int64_t at(std::int64_t index) const { return values[(index < hi ? index : hi) - lo]; }
    std::int64_t best() const { return values[hi - lo]; }
  };

  const Row& row(int id, int format) const {
    return rows_[ChainNumbers::at(id) * ChainNumbers::at(numbers_.num_formats) +
                 ChainNumbers::at(format)];
  }
  const Row& chain_row() const { return row(intervals_.id(0, numbers_.L - 1), 0); }
  const Row& rest_row(int first, int last) const {
    return first < last ? row(intervals_.id(first + 1, last), 0) : nothing_;
  }

  void solve(int id, int format);
  std::int64_t lowest_index(int first, int last, int format) const;
  std::int64_t ample_index(int first, int last, int format) const;
  void relax_keeps(int first, int last, int format);
  void relax_splits(int first, int last, int format);
  void relax(std::int64_t begin, std::int64_t end, const Row& a, std::int64_t a_shift, const Row& b,
             std::int64_t b_shift, std::int64_t time_ns);
  void store_row(Row& row);
  Decision decide(const Interval& interval) const;

  const ChainNumbers& numbers_;
  const Intervals& intervals_;
  Grid grid_;
  bool prune_;
  Row nothing_;  ///< of an interval without stages: no time, at any index
  std::vector<Row> rows_;
  std::vector<std::int64_t> ample_;  ///< index from which on a row is constant
  struct Free {
    void operator()(std::int64_t* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<std::int64_t[], Free>> blocks_;
  std::int64_t block_left_ = 0;
  std::int64_t* block_next_ = nullptr;
  std::vector<std::int64_t> scratch_;  ///< the row being solved, from scratch_lo_ to scratch_hi_
  std::int64_t scratch_lo_ = 0;
  std::int64_t scratch_hi_ = -1;
};

}  // namespace headroom
