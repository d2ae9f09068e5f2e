#include "train/windows.h"

#include <headroom/core/error.h>
#include "core/counter_random.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace headroom {

std::int64_t Grouping::window_samples(std::int64_t epoch) const {
  return global_batch > 0 ? global_batch : micro_batch * schedule.steps_at(epoch) * num_ranks;
}

std::int64_t Grouping::num_windows(std::int64_t epoch) const {
  const std::int64_t window = window_samples(epoch);
  return drop_last ? num_samples / window : (num_samples + window - 1) / window;
}

std::int64_t Grouping::num_updates(double epochs) const {
  const auto whole = static_cast<std::int64_t>(std::floor(epochs));
  std::int64_t updates = 0;
  for (std::int64_t epoch = 0; epoch < whole; ++epoch) updates += num_windows(epoch);
  const double rest = epochs - static_cast<double>(whole);
  return updates + static_cast<std::int64_t>(
                       std::ceil(rest * static_cast<double>(num_windows(whole)) - 1e-9));
}

std::vector<std::int64_t> Grouping::window_sizes(std::int64_t first, std::int64_t end) const {
  std::vector<std::int64_t> sizes;
  const std::int64_t last_epoch = schedule.changes().back().epoch;  // nothing changes after it
  for (std::int64_t epoch = 0, begin = 0; begin < end && epoch <= last_epoch; ++epoch) {
    begin += num_windows(epoch);
    const std::int64_t size = std::min(window_samples(epoch), num_samples);
    const bool is_met = begin > first || epoch == last_epoch;
    if (is_met && std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
  }
  return sizes;
}

Share share_of(std::int64_t num_samples, std::int64_t rank, std::int64_t num_ranks) {
  const std::int64_t size = num_samples / num_ranks, rest = num_samples % num_ranks;
  const std::int64_t begin = rank * size + std::min(rank, rest);
  return {begin, begin + size + (rank < rest ? 1 : 0)};
}

namespace {

// Sorts by length inside of each chunk of whole windows, then orders those windows by the seed.
std::vector<std::int64_t> grouped_by_length(const SampleOrder& given, const Grouping& grouping,
                                            std::int64_t epoch) {
  constexpr std::int64_t kWindowsTogether = 50;
  std::vector<std::int64_t> order(static_cast<std::size_t>(given.size()));
  for (std::int64_t place = 0; place < given.size(); ++place)
    order[static_cast<std::size_t>(place)] = given[place];
  const std::int64_t window = grouping.window_samples(epoch), chunk = kWindowsTogether * window,
                     count = given.size();
  for (std::int64_t begin = 0; begin < count; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, count);
    std::stable_sort(order.begin() + begin, order.begin() + end,
                     [&](std::int64_t a, std::int64_t b) {
                       return grouping.length_of(a) > grouping.length_of(b);
                     });
    if (!grouping.shuffle) continue;
    const std::vector<std::int64_t> sorted(order.begin() + begin, order.begin() + end);
    const SampleOrder windows((end - begin) / window, true,
                              mix(grouping.seed) + static_cast<std::uint64_t>(begin), epoch);
    for (std::int64_t i = 0; i < windows.size(); ++i) {
      std::copy_n(sorted.begin() + windows[i] * window, window, order.begin() + begin + i * window);
    }
  }
  return order;
}

}  // namespace

WindowWalk::WindowWalk(Grouping grouping, std::int64_t num_updates)
    : grouping_(std::move(grouping)), updates_done_(num_updates) {
  for (const AccumulationSchedule::Change& change : grouping_.schedule.changes()) {
    if (grouping_.num_windows(change.epoch) > 0) continue;
    throw ConfigError(
        fmt::format("--dataloader_drop_last leaves nothing to train on: {} samples are fewer than "
                    "one window of {}",
                    grouping_.num_samples, grouping_.window_samples(change.epoch)));
  }
  seek(num_updates);
}

void WindowWalk::start_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  windows_done_ = 0;
  order_ = SampleOrder(grouping_.num_samples, grouping_.shuffle, grouping_.seed, epoch);
  if (grouping_.length_of) order_ = SampleOrder(grouped_by_length(order_, grouping_, epoch));
}

Window WindowWalk::next() {
  if (windows_done_ == grouping_.num_windows(epoch_)) start_epoch(epoch_ + 1);
  const std::int64_t size = grouping_.window_samples(epoch_);
  const std::int64_t first = windows_done_ * size;
  const std::int64_t end = std::min(first + size, grouping_.num_samples);
  const std::int64_t offset = grouping_.resamples_each_epoch ? epoch_ * grouping_.num_samples : 0;
  ++windows_done_;
  ++updates_done_;
  Window window{{}, std::min(size, grouping_.num_samples), updates_done_};
  window.samples.reserve(static_cast<std::size_t>(end - first));
  for (std::int64_t place = first; place < end; ++place)
    window.samples.push_back(offset + order_[place]);
  return window;
}

void WindowWalk::seek(std::int64_t num_updates) {
  std::int64_t epoch = 0;
  while (num_updates > grouping_.num_windows(epoch)) num_updates -= grouping_.num_windows(epoch++);
  start_epoch(epoch);
  windows_done_ = num_updates;
}

double WindowWalk::epochs_done() const {
  return static_cast<double>(epoch_) +
         static_cast<double>(windows_done_) / static_cast<double>(grouping_.num_windows(epoch_));
}

}  // namespace headroom
