#include "plan/slot_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <stdexcept>

// 64-bit minima need AVX2 to be vectorised, which a portable build must not assume: the loader
// picks the version for the machine. Sanitizers cannot be loaded before that choice is made.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define HEADROOM_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HEADROOM_VECTORISED
#endif

namespace headroom {
namespace {

/// More than any time; validate() keeps three of them inside 64 bits.
constexpr std::int64_t kNever = std::int64_t{1} << 61;
/// An index that no budget reaches, far enough from the limits to be added to.
constexpr std::int64_t kNoIndex = std::numeric_limits<std::int64_t>::max() / 4;
constexpr std::int64_t kBlockEntries = std::int64_t{1}
                                       << 12;  ///< of the first block; later ones are larger
constexpr std::int64_t kZero = 0;

/// Entries that are looked at together. Rows fall as memory grows: what two of them reach at the
/// end of a block bounds the whole of it, and mostly shows that nothing there can be lowered.
constexpr std::int64_t kRelaxBlock = 16;

/// And blocks that are looked at together in the same way.
constexpr std::int64_t kRelaxRun = 8 * kRelaxBlock;

HEADROOM_VECTORISED void relax_both(std::int64_t* __restrict best, const std::int64_t* __restrict a,
                                    const std::int64_t* __restrict b, std::int64_t time_ns,
                                    std::int64_t count) {
  std::int64_t begin = 0;
  while (begin + kRelaxBlock <= count) {
    const std::int64_t run = begin + kRelaxRun - 1;
    if (run < count && a[run] + b[run] + time_ns >= best[begin]) {
      begin += kRelaxRun;
      continue;
    }
    const std::int64_t end = run < count ? run + 1 : count;
    for (; begin + kRelaxBlock <= end; begin += kRelaxBlock) {
      const std::int64_t last = begin + kRelaxBlock - 1;
      if (a[last] + b[last] + time_ns >= best[begin]) continue;
      for (std::int64_t i = begin; i < begin + kRelaxBlock; ++i) {
        const std::int64_t candidate = a[i] + b[i] + time_ns;
        best[i] = candidate < best[i] ? candidate : best[i];
      }
    }
  }
  for (std::int64_t i = begin; i < count; ++i) {
    const std::int64_t candidate = a[i] + b[i] + time_ns;
    best[i] = candidate < best[i] ? candidate : best[i];
  }
}

HEADROOM_VECTORISED void relax_one(std::int64_t* __restrict best, const std::int64_t* __restrict a,
                                   std::int64_t time_ns, std::int64_t count) {
  std::int64_t begin = 0;
  while (begin + kRelaxBlock <= count) {
    const std::int64_t run = begin + kRelaxRun - 1;
    if (run < count && a[run] + time_ns >= best[begin]) {
      begin += kRelaxRun;
      continue;
    }
    const std::int64_t end = run < count ? run + 1 : count;
    for (; begin + kRelaxBlock <= end; begin += kRelaxBlock) {
      if (a[begin + kRelaxBlock - 1] + time_ns >= best[begin]) continue;
      for (std::int64_t i = begin; i < begin + kRelaxBlock; ++i) {
        const std::int64_t candidate = a[i] + time_ns;
        best[i] = candidate < best[i] ? candidate : best[i];
      }
    }
  }
  for (std::int64_t i = begin; i < count; ++i) {
    const std::int64_t candidate = a[i] + time_ns;
    best[i] = candidate < best[i] ? candidate : best[i];
  }
}

/// Rows are read far apart, a few numbers each: with pages of the usual size, finding them takes
/// longer than reading them.
constexpr std::size_t kLargePage = std::size_t{2} << 20;

std::int64_t* allocate_block(std::int64_t num_entries) {
  std::size_t bytes = static_cast<std::size_t>(num_entries) * sizeof(std::int64_t);
  void* block = nullptr;
  if (bytes < kLargePage) {
    block = std::malloc(bytes);
  } else {
    bytes = (bytes + kLargePage - 1) / kLargePage * kLargePage;
    block = std::aligned_alloc(kLargePage, bytes);
#ifdef MADV_HUGEPAGE
    if (block != nullptr) ::madvise(block, bytes, MADV_HUGEPAGE);  // or not, where it cannot be
#endif
  }
  if (block == nullptr) throw std::bad_alloc();
  return static_cast<std::int64_t*>(block);
}

}  // namespace

SlotTable::SlotTable(const ChainNumbers& numbers, const Intervals& intervals, const Grid& grid,
                     bool prune)
    : numbers_(numbers), intervals_(intervals), grid_(grid), prune_(prune) {
  nothing_.lo = nothing_.hi = -kNoIndex;
  nothing_.values = &kZero;
  rows_.resize(numbers.at(intervals.size()) * numbers.at(numbers.num_formats));
  ample_.assign(rows_.size(), kNoIndex);
  for (int id = 0; id < intervals.size(); ++id) {
    for (int format = 0; format < numbers.num_formats; ++format) solve(id, format);
  }
}

void SlotTable::solve(int id, int format) {
  const std::size_t index = static_cast<std::size_t>(&row(id, format) - rows_.data());
  Row& result = rows_[index];
  result.lo = kNoIndex;
  result.hi = kNoIndex;
  const auto [first, last] = intervals_.representatives()[numbers_.at(id)];
  if (!numbers_.useful(format, first)) return;
  ample_[index] = ample_index(first, last, format);
  scratch_lo_ = lowest_index(first, last, format);
  if (scratch_lo_ > grid_.top) return;
  scratch_hi_ = std::min(grid_.top, std::max(scratch_lo_, ample_[index]));
  scratch_.assign(static_cast<std::size_t>(scratch_hi_ - scratch_lo_ + 1), kNever);
  relax_keeps(first, last, format);
  relax_splits(first, last, format);
  store_row(result);
}

/// The lowest feasible index, which needs only the lowest ones of the parts.
std::int64_t SlotTable::lowest_index(int first, int last, int format) const {
  std::int64_t lowest = kNoIndex;
  const Row& rest = rest_row(first, last);
  for (const ChainNumbers::Option& option : numbers_.options[numbers_.at(first)]) {
    const std::int64_t after = grid_.units(numbers_.kept(first, format, option)) + rest.lo;
    if (after >= lowest) continue;
    lowest = std::min(
        lowest,
        std::max(after, grid_.index_of_need(numbers_.keep_need(first, last, format, option))));
  }
  Sweep sweep(numbers_, first, last, format);
  for (int split = first + 1; split <= last; ++split) {
    sweep.extend_to(split);
    const Row& left = row(intervals_.id(first, split - 1), format);
    if (left.lo >= lowest) continue;
    const int right_id = intervals_.id(split, last);
    for (int q = 0; q < numbers_.num_formats; ++q) {
      const std::int64_t right_lo = row(right_id, q).lo;
      if (right_lo >= lowest) continue;
      const std::int64_t parts = std::max(
          left.lo + grid_.units(numbers_.P[numbers_.at(last + 1)] - numbers_.P[numbers_.at(split)]),
          right_lo + grid_.units(numbers_.added_as(q, first, format, split - 1)));
      if (parts < lowest)
        lowest = std::min(lowest, std::max(parts, grid_.index_of_need(sweep.need(q))));
    }
  }
  return lowest;
}

/// From this index on the fastest option of every stage can be kept, and nothing is faster.
std::int64_t SlotTable::ample_index(int first, int last, int format) const {
  const ChainNumbers::Option& fastest =
      numbers_.options[numbers_.at(first)][numbers_.at(numbers_.fastest[numbers_.at(first)])];
  const std::int64_t own = grid_.index_of_need(numbers_.keep_need(first, last, format, fastest));
  if (first == last) return own;
  const std::size_t rest =
      numbers_.at(intervals_.id(first + 1, last)) * numbers_.at(numbers_.num_formats);
  return std::min(kNoIndex,
                  std::max(own, grid_.units(numbers_.kept(first, format, fastest)) + ample_[rest]));
}

void SlotTable::relax_keeps(int first, int last, int format) {
  const Row& rest = rest_row(first, last);
  for (const ChainNumbers::Option& option : numbers_.options[numbers_.at(first)]) {
    const std::int64_t shift = grid_.units(numbers_.kept(first, format, option));
    const std::int64_t begin = std::max(
        shift + rest.lo, grid_.index_of_need(numbers_.keep_need(first, last, format, option)));
    if (begin <= scratch_hi_)
      relax(begin, scratch_hi_ + 1, rest, shift, nothing_, 0,
            numbers_.keep_ns(first, format, option));
  }
}

void SlotTable::relax_splits(int first, int last, int format) {
  Sweep sweep(numbers_, first, last, format);
  for (int split = first + 1; split <= last; ++split) {
    sweep.extend_to(split);
    const Row& left = row(intervals_.id(first, split - 1), format);
    if (left.lo > scratch_hi_) continue;
    const int right_id = intervals_.id(split, last);
    for (int q = 0; q < numbers_.num_formats; ++q) {
      const Row& right = row(right_id, q);
      if (right.lo > scratch_hi_) continue;
      const std::int64_t left_shift =
          grid_.units(numbers_.P[numbers_.at(last + 1)] - numbers_.P[numbers_.at(split)]);
      const std::int64_t right_shift = grid_.units(numbers_.added_as(q, first, format, split - 1));
      std::int64_t begin = std::max({scratch_lo_, left.lo + left_shift, right.lo + right_shift});
      if (begin > scratch_hi_) continue;
      const std::int64_t time_ns = sweep.time_ns(q);
      // The row falls as memory grows, so that what the split can at best reach wins on a prefix of
      // the indices or nowhere.
      const std::int64_t at_best = time_ns + left.best() + right.best();
      const auto wins = [&](std::int64_t value) { return value > at_best; };
      const auto position = [&](std::int64_t index) {
        return scratch_.begin() + (index - scratch_lo_);
      };
      if (prune_ && !wins(*position(begin))) continue;
      begin = std::max(begin, grid_.index_of_need(sweep.need(q)));
      if (begin > scratch_hi_) continue;
      std::int64_t end = scratch_hi_ + 1;
      if (prune_)
        end = scratch_lo_ +
              (std::partition_point(position(begin), scratch_.end(), wins) - scratch_.begin());
      if (begin < end) relax(begin, end, right, right_shift, left, left_shift, time_ns);
    }
  }
}

/// Lowers the row to a[i - a_shift] + b[i - b_shift] + time_ns for begin <= i < end, both rows
/// being constant above their last entry.
void SlotTable::relax(std::int64_t begin, std::int64_t end, const Row& a, std::int64_t a_shift,
                      const Row& b, std::int64_t b_shift, std::int64_t time_ns) {
  if (a.hi + a_shift < b.hi + b_shift) {
    relax(begin, end, b, b_shift, a, a_shift, time_ns);
    return;
  }
  const auto best = [this](std::int64_t index) { return scratch_.data() + (index - scratch_lo_); };
  const std::int64_t both_end = std::min(end, b.hi + b_shift);
  if (begin < both_end) {
    relax_both(best(begin), a.values + (begin - a_shift - a.lo),
               b.values + (begin - b_shift - b.lo), time_ns, both_end - begin);
    begin = both_end;
  }
  const std::int64_t one_end = std::min(end, a.hi + a_shift);
  if (begin < one_end) {
    relax_one(best(begin), a.values + (begin - a_shift - a.lo), time_ns + b.best(),
              one_end - begin);
    begin = one_end;
  }
  const std::int64_t constant = time_ns + a.best() + b.best();
  for (std::int64_t i = begin; i<end&& * best(i)> constant; ++i) *best(i) = constant;
}

/// Copies the row to its place, without its constant end.
void SlotTable::store_row(Row& result) {
  const auto constant_from =
      std::partition_point(scratch_.begin(), scratch_.end(),
                           [&](std::int64_t value) { return value > scratch_.back(); });
  const std::int64_t count = constant_from - scratch_.begin() + 1;
  if (count > block_left_) {
    block_left_ = std::max(count, kBlockEntries << std::min<std::size_t>(blocks_.size(), 8));
    blocks_.emplace_back(allocate_block(block_left_));
    block_next_ = blocks_.back().get();
  }
  std::copy_n(scratch_.begin(), count, block_next_);
  result.lo = scratch_lo_;
  result.hi = scratch_lo_ + count - 1;
  result.values = block_next_;
  block_next_ += count;
  block_left_ -= count;
}

std::vector<std::int64_t> SlotTable::steps() const {
  std::vector<std::int64_t> indices;
  const Row& whole = chain_row();
  for (std::int64_t index = whole.lo; index <= whole.hi && whole.values != nullptr; ++index) {
    if (index == whole.lo || whole.at(index) != whole.at(index - 1)) indices.push_back(index);
  }
  return indices;
}

std::vector<Operation> SlotTable::extract(std::int64_t index) const {
  // The smallest memory with the same time gives the same time with a lower peak.
  const Row& whole = chain_row();
  const std::int64_t last = std::min(index, whole.hi) - whole.lo;
  const std::int64_t time_ns = whole.values[last];
  const std::int64_t* const least = std::partition_point(
      whole.values, whole.values + last, [&](std::int64_t value) { return value > time_ns; });
  return expand_schedule(numbers_.L, whole.lo + (least - whole.values),
                         [this](const Interval& interval) { return decide(interval); });
}

/// Finds again the choice that gave the entry its value.
Decision SlotTable::decide(const Interval& interval) const {
  const int first = interval.first, last = interval.last, format = interval.format;
  const std::int64_t index = interval.state;
  const std::int64_t time_ns = row(intervals_.id(first, last), format).at(index);
  const Row& rest = rest_row(first, last);
  const std::vector<ChainNumbers::Option>& options = numbers_.options[numbers_.at(first)];
  for (std::size_t k = 0; k < options.size(); ++k) {
    const std::int64_t left = index - grid_.units(numbers_.kept(first, format, options[k]));
    if (left < rest.lo ||
        index < grid_.index_of_need(numbers_.keep_need(first, last, format, options[k])))
      continue;
    if (rest.at(left) + numbers_.keep_ns(first, format, options[k]) == time_ns)
      return Decision::keep(static_cast<int>(k), left);
  }
  Sweep sweep(numbers_, first, last, format);
  for (int split = first + 1; split <= last; ++split) {
    sweep.extend_to(split);
    const Row& left = row(intervals_.id(first, split - 1), format);
    const std::int64_t left_index =
        index - grid_.units(numbers_.P[numbers_.at(last + 1)] - numbers_.P[numbers_.at(split)]);
    if (left_index < left.lo) continue;
    for (int q = 0; q < numbers_.num_formats; ++q) {
      const Row& right = row(intervals_.id(split, last), q);
      const std::int64_t right_index =
          index - grid_.units(numbers_.added_as(q, first, format, split - 1));
      if (right_index < right.lo || index < grid_.index_of_need(sweep.need(q))) continue;
      if (sweep.time_ns(q) + right.at(right_index) + left.at(left_index) == time_ns)
        return Decision::sweep(split, q, right_index, left_index);
    }
  }
  throw std::logic_error("the planner's table does not explain its own entry");
}

}  // namespace headroom
