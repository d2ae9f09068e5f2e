#pragma once

#include <headroom/config/chain_costs.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace headroom {

/// Of what a boundary takes in `format`, at least this is there already when a part of `full_bytes`
/// of it is in another boundary of that format: it is stored once.
inline std::int64_t shared_bytes(const BoundaryFormat& format, std::int64_t full_bytes) {
  return static_cast<std::int64_t>(std::floor(format.size_ratio * static_cast<double>(full_bytes)));
}

/// A chain in the symbols of docs/planning.md. Stages count from 0: stage l reads boundary l and
/// makes boundary l + 1, so that boundary 0 is the input and boundary L the loss.
struct ChainNumbers {
  explicit ChainNumbers(const ChainCosts& chain);

  struct Option {
    std::int64_t S, oF, oB;
    std::int64_t time_ns;  ///< forward + backward
    bool fits = true;
  };

  int L;
  int num_formats;                         ///< with full, which is format 0
  std::vector<std::int64_t> A, G;          ///< by boundary
  std::vector<std::int64_t> oN, p;         ///< by stage, as all that follow
  std::vector<std::int64_t> own;           ///< of the output, what the stage itself allocates
  std::vector<std::int64_t> carried_grad;  ///< of G[l], what is memory of G[l + 1]
  std::vector<std::vector<CarriedBytes>> carried;
  std::vector<std::int64_t> F;               ///< forward times of all stages before
  std::vector<std::int64_t> P;               ///< p of all stages before
  std::vector<std::vector<Option>> options;  ///< one that does not fit is larger than any budget
  std::vector<int> fastest;  ///< option of least time; of those, the one that keeps least
  std::vector<BoundaryFormat> formats;                                  ///< but for full
  std::vector<std::vector<std::int64_t>> stored, encode_ns, decode_ns;  ///< [format][boundary]

  /// Whether a format can ever help at a boundary.
  bool useful(int format, int boundary) const {
    return format == 0 || (boundary > 0 && stored[at(format)][at(boundary)] < A[at(boundary)]);
  }

  /// Bytes that the output of stage l adds while the input of `first` is held in `format`: what it
  /// carries of that boundary is there already, unless it is in another format.
  std::int64_t added(int first, int format, int l) const {
    return format == 0 ? A[at(l + 1)] - carried_from(first, l) : A[at(l + 1)];
  }
  /// The same of that output in boundary format q.
  std::int64_t added_as(int q, int first, int format, int l) const {
    if (q == 0) return added(first, format, l);
    std::int64_t bytes = stored[at(q)][at(l + 1)];
    if (q != format) return bytes;
    for (const CarriedBytes& part : carried[at(l)]) {
      if (l - part.stages_back < first) bytes -= shared_bytes(formats[at(q - 1)], part.bytes);
    }
    return bytes;
  }
  /// Time of putting that output into format q.
  std::int64_t encode_as_ns(int q, int first, int format, int l) const {
    if (q == 0 || q != format || carried[at(l)].empty()) return encode_ns[at(q)][at(l + 1)];
    return formats[at(q - 1)].encode_ns(A[at(l + 1)] - carried_from(first, l),
                                        F[at(l + 2)] - F[at(l + 1)]);
  }
  /// Of the output of stage l, what the input of `first` holds as well.
  std::int64_t carried_from(int first, int l) const {
    std::int64_t bytes = 0;
    for (const CarriedBytes& part : carried[at(l)]) {
      if (l - part.stages_back < first) bytes += part.bytes;
    }
    return bytes;
  }
  /// Bytes that Keep(option) of `first` adds while its input is held in `format`.
  std::int64_t kept(int first, int format, const Option& option) const {
    return format == 0 ? option.S : option.S + A[at(first + 1)] - own[at(first)];
  }

  /// Memory that Keep(option) of `first` needs inside first..last, without what follows: the larger
  /// of its forward and its backward.
  std::int64_t keep_need(int first, int last, int format, const Option& option) const;
  std::int64_t keep_ns(int first, int format, const Option& option) const {
    return option.time_ns + 2 * decode_ns[at(format)][at(first)];
  }

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
};

/// The sweep of Split(j), as j grows: its need and time for one interval.
class Sweep {
 public:
  Sweep(const ChainNumbers& numbers, int first, int last, int format)
      : n_(numbers), first_(first), last_(last), format_(format), widest_(0) {}

  /// Moves on to the sweep first..split-1. To be called with split = first+1, first+2, ...
  void extend_to(int split) {
    const int i = split - 1;
    const std::int64_t input = i > first_     ? n_.added(first_, format_, i - 1)
                               : format_ != 0 ? n_.A[n_.at(i)]
                                              : 0;
    const std::int64_t width = input + n_.own[n_.at(i)] + n_.oN[n_.at(i)];
    if (width > widest_) widest_ = width;
    split_ = split;
  }

  /// Bytes of the sweep, and of putting the input of `split` into `boundary_format`.
  std::int64_t need(int boundary_format) const {
    const std::int64_t held = boundary_format == 0
                                  ? 0
                                  : n_.added(first_, format_, split_ - 1) +
                                        n_.added_as(boundary_format, first_, format_, split_ - 1);
    return n_.G[n_.at(last_ + 1)] + (held > widest_ ? held : widest_);
  }
  std::int64_t time_ns(int boundary_format) const {
    return n_.F[n_.at(split_)] - n_.F[n_.at(first_)] + n_.decode_ns[n_.at(format_)][n_.at(first_)] +
           n_.encode_as_ns(boundary_format, first_, format_, split_ - 1);
  }

 private:
  const ChainNumbers& n_;
  int first_, last_, format_, split_ = 0;
  std::int64_t widest_;
};

/// Names the intervals of a chain so that equal ones share a name. Two intervals are equal when
/// their stages, and what stands before each, have equal numbers: N equal blocks need about 3N
/// names instead of N^2/2. Names are nodes of a trie over classes of stages, so that no two
/// different sequences can share one.
class Intervals {
 public:
  /// Stops soon after `limit` names: then size() is larger than that, and nothing else is of use.
  Intervals(const ChainNumbers& numbers, bool intern, int limit = std::numeric_limits<int>::max());

  /// The name of first..last, 0 <= first <= last < L.
  int id(int first, int last) const { return ids_[slot(first, last)]; }
  /// One interval of each name, after all of its parts: the index is the name.
  const std::vector<std::pair<int, int>>& representatives() const { return representatives_; }
  int size() const { return static_cast<int>(representatives_.size()); }

 private:
  static std::size_t slot(int first, int last) {
    return static_cast<std::size_t>(last) * static_cast<std::size_t>(last + 1) / 2 +
           static_cast<std::size_t>(first);
  }

  std::vector<int> ids_;
  std::vector<std::pair<int, int>> representatives_;
};

/// The memory range in which each interval has something to decide, in exact bytes.
struct IntervalBounds {
  IntervalBounds(const ChainNumbers& numbers, const Intervals& intervals);

  std::int64_t least(int id, int format) const { return least_bytes[index(id, format)]; }
  std::int64_t ample(int id, int format) const { return ample_bytes[index(id, format)]; }
  std::size_t index(int id, int format) const {
    return ChainNumbers::at(id) * ChainNumbers::at(num_formats) + ChainNumbers::at(format);
  }

  int num_formats;
  std::vector<std::int64_t> least_bytes;  ///< below this nothing fits
  std::vector<std::int64_t>
      ample_bytes;  ///< from this on the fastest option of every stage can be kept
};

}  // namespace headroom
