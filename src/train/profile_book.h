#pragma once

// What a chain costs at any micro-batch size, from measurements at a few.

#include <headroom/model/chain.h>
#include "execute/profile.h"
#include "execute/static_pager.h"

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

class ProfileBook {
 public:
  using Load = std::function<MicroBatch(std::int64_t num_samples)>;

  /// Reads what an earlier run left in `cache_folder` under the same key; an empty folder keeps
  /// nothing. With a `spill_dir`, chains offer to spill boundaries there, at the speed that is
  /// measured with each size.
  ProfileBook(const Chain& chain, Load load, std::optional<at::ScalarType> half,
              std::optional<at::ScalarType> compute, std::string spill_dir,
              std::string cache_folder, std::string cache_key);

  /// Measures this size unless that was done before. False when a stage alone does not fit under
  /// the meter's cap.
  bool measure(std::int64_t num_samples);

  /// From now on the weights of each stage are brought into memory before it is measured. What did
  /// not fit beside all of them may fit now. The pager must outlive the book.
  void page_with(StaticPager* pager);

  /// Measures the fewest samples that the chain runs on, and returns their number: 1, or 2 for a
  /// model of somebody else's that refuses one (batch norms of single values do). Fewer are then
  /// said not to fit.
  std::int64_t measure_smallest();

  /// Measures a few sizes up to `num_samples`, doubling from the smallest, until samples of a
  /// larger micro-batch are no faster, a whole update's worth of time was spent, or a size does not
  /// fit.
  void explore(std::int64_t num_samples);

  bool is_measured(std::int64_t num_samples) const { return measured_.count(num_samples) != 0; }
  /// Whether a plan may rest on at(num_samples): it was measured, or its bytes are counted, as they
  /// were for two measured sizes at least, and its times lie on a line that is not drawn out far.
  bool is_known(std::int64_t num_samples) const;
  /// Measures what it takes to know this size: itself, or smaller ones where they will do. False
  /// when one of them does not fit.
  bool know(std::int64_t num_samples);
  /// False when this size, or a smaller one, was found not to fit, or the chain not to run on it.
  bool may_fit(std::int64_t num_samples) const {
    return num_samples >= smallest_size_ &&
           (!smallest_failure_ || num_samples < *smallest_failure_);
  }

  /// Measured, or on the line through the nearest measured sizes; bytes are then counted without
  /// memory where the chain allows that. At least one size must have been measured.
  ChainProfile at(std::int64_t num_samples) const;

  /// A micro-batch to measure with.
  MicroBatch load(std::int64_t num_samples) const { return load_(num_samples); }
  /// How long loading takes, by the nearest measured size.
  std::int64_t load_ns(std::int64_t num_samples) const;

  /// A figure of this chain on this machine that takes a while to measure: what `measure` returns,
  /// or returned for the same name before, in an earlier run too. It must be above 0. Nothing is
  /// not remembered.
  std::optional<double> figure(const std::string& name,
                               const std::function<std::optional<double>()>& measure);

  /// Leaves what was measured in the cache folder, for the next run. Profiles of a cap that some
  /// option did not fit are not left: another run may have more room.
  void save() const;

  double seconds() const { return seconds_; }  ///< spent on measuring

 private:
  // Whether counting was right for every size that was measured, of which there are some.
  bool counts_bytes() const;
  std::int64_t size_to_measure(std::int64_t num_samples) const;  // the next, to know this one
  void read_cache();
  void read_cached_size(std::istream& index);
  void write_cache() const;
  ChainProfile on_line(std::int64_t num_samples) const;
  /// Null where bytes cannot be counted, or were once found to differ from measured ones.
  const ChainProfile* counted(std::int64_t num_samples) const;
  void add_boundary_formats(ChainProfile& profile);

  const Chain& chain_;
  Load load_;
  std::optional<at::ScalarType> half_;
  std::optional<at::ScalarType> compute_;
  std::string spill_dir_;
  StaticPager* pager_ = nullptr;
  std::string cache_folder_;
  std::string cache_key_;
  std::map<std::int64_t, ChainProfile> measured_;
  mutable std::map<std::int64_t, ChainProfile> counted_;
  mutable MicroBatch sample_;  // the shapes of one sample; empty until it is needed
  mutable bool can_count_;
  std::map<std::int64_t, std::int64_t> load_ns_;
  std::map<std::string, double> figures_;
  std::vector<BoundaryFormat> boundary_formats_;
  std::int64_t timed_boundary_bytes_ = 0;  // that the formats were measured with
  std::optional<std::int64_t> smallest_failure_;
  std::int64_t smallest_size_ = 1;
  double seconds_ = 0.0;
  double cached_seconds_ = 0.0;  // that earlier runs spent
};

}  // namespace headroom
