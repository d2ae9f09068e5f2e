#pragma once

// Which samples make each update: the order of epochs, cut into windows, and those into the shares
// of the ranks.

#include <headroom/config/accumulation_schedule.h>
#include "data/sample_order.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace headroom {

/// How samples are grouped. Exactly one of `global_batch` and `schedule` decides a window's size.
struct Grouping {
  std::int64_t num_samples = 0;       ///< of an epoch
  bool resamples_each_epoch = false;  ///< what the data set says
  std::int64_t micro_batch = 1;       ///< most samples in memory at once, on each rank
  std::int64_t num_ranks = 1;         ///< that share a window
  std::int64_t global_batch =
      0;  ///< samples of a window; 0: micro_batch x schedule's steps x ranks
  AccumulationSchedule schedule;
  bool drop_last = false;
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Where it is set, samples of like length come together in a window, and windows in their order
  /// by the seed: of fifty windows at a time, so that every epoch is grouped anew.
  std::function<std::int64_t(std::int64_t sample)> length_of;

  std::int64_t window_samples(std::int64_t epoch) const;
  /// Windows in an epoch; 0 only when drop_last leaves none.
  std::int64_t num_windows(std::int64_t epoch) const;
  /// Updates of `epochs` passes over the data (a fraction is rounded up).
  std::int64_t num_updates(double epochs) const;
  /// The different sizes of full windows from update `first` (from 0) up to `end`, in the order in
  /// which they occur; none above the samples that there are.
  std::vector<std::int64_t> window_sizes(std::int64_t first, std::int64_t end) const;
};

/// Samples by their places in a window: [begin, end).
struct Share {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// What rank `rank` trains of a window of `num_samples`: shares follow each other, differ by at
/// most one sample, the larger ones first. Some are empty where there are fewer samples than ranks.
Share share_of(std::int64_t num_samples, std::int64_t rank, std::int64_t num_ranks);

/// What one update is made of.
struct Window {
  std::vector<std::int64_t> samples;
  std::int64_t full_size =
      0;                    ///< samples of a full window of its epoch: the last one may have less
  std::int64_t update = 0;  ///< the number of the update, from 1

  std::int64_t num_samples() const { return static_cast<std::int64_t>(samples.size()); }
};

/// Walks through the windows, epoch after epoch, without end.
class WindowWalk {
 public:
  /// Starts at the place after `num_updates` updates, as if next() had been called that often.
  /// Throws ConfigError when an epoch would have no window.
  explicit WindowWalk(Grouping grouping, std::int64_t num_updates = 0);

  Window next();

  std::int64_t num_done() const { return updates_done_; }  ///< windows given, and skipped at first
  std::int64_t epoch() const { return epoch_; }            ///< of the window that next() gave last
  /// Epochs done, as a fraction, after the window that next() gave last.
  double epochs_done() const;

 private:
  void start_epoch(std::int64_t epoch);
  void seek(std::int64_t num_updates);

  Grouping grouping_;
  std::int64_t epoch_ = 0;
  std::int64_t windows_done_ = 0;  // in this epoch
  std::int64_t updates_done_ = 0;
  SampleOrder order_;
};

}  // namespace headroom
