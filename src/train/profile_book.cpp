#include "train/profile_book.h"
#include "core/input_file.h"
#include "core/output_file.h"

#include <headroom/core/error.h>
#include "core/figures.h"
#include "core/integers.h"
#include "core/log.h"
#include "execute/boundary_format.h"
#include "memory/device_clock.h"
#include "memory/shape_meter.h"
#include "report/json.h"
#include "train/stop.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

namespace headroom {
namespace {

namespace fs = std::filesystem;
// The format of `headroom plan --chain`, so that a measured chain can be planned again by hand.
Json chain_json(const ChainCosts& chain) {
  Json stages = Json::array();
  for (const StageCosts& stage : chain.stages) {
    Json options = Json::array();
    for (const StageOption& option : stage.options) {
      options.push(Json::object()
                       .set("kept_bytes", option.kept_bytes)
                       .set("forward_ns", option.forward_ns)
                       .set("backward_ns", option.backward_ns)
                       .set("forward_transient_bytes", option.forward_transient_bytes)
                       .set("backward_transient_bytes", option.backward_transient_bytes));
    }
    Json carried = Json::array();
    for (const CarriedBytes& part : stage.carried)
      carried.push(Json::object().set("stages_back", part.stages_back).set("bytes", part.bytes));
    stages.push(Json::object()
                    .set("name", stage.name)
                    .set("output_bytes", stage.output_bytes)
                    .set("grad_bytes", stage.grad_bytes)
                    .set("forward_ns", stage.forward_ns)
                    .set("forward_transient_bytes", stage.forward_transient_bytes)
                    .set("param_grad_bytes", stage.param_grad_bytes)
                    .set("carried", carried)
                    .set("carried_grad_bytes", stage.carried_grad_bytes)
                    .set("options", options));
  }
  Json formats = Json::array();
  for (const BoundaryFormat& format : chain.boundary_formats) {
    formats.push(Json::object()
                     .set("name", format.name)
                     .set("size_ratio", format.size_ratio)
                     .set("encode_ns_per_byte", format.encode_ns_per_byte)
                     .set("decode_ns_per_byte", format.decode_ns_per_byte)
                     .set("encode_overlap", format.encode_overlap)
                     .set("decode_overlap", format.decode_overlap));
  }
  return Json::object().set("stages", stages).set("boundary_formats", formats);
}

// A plan may rest on times of this many times the largest measured size. Beyond, the error of the
// line's slope would count for more than what is saved.
constexpr std::int64_t kFarthest = 4;

// Nanoseconds and ratios beyond it are no measurements.
constexpr double kLargestFigure = 1e18;

fs::path chain_file(const std::string& folder, std::int64_t num_samples, const char* kind) {
  return fs::path(folder) / fmt::format("{}-{}.json", num_samples, kind);
}

// Of one step over this micro-batch with everything kept.
double step_seconds(const ChainProfile& profile) {
  double ns = 0.0;
  for (const StageCosts& stage : profile.grads_preallocated.stages) {
    ns += static_cast<double>(stage.options.front().forward_ns + stage.options.front().backward_ns);
  }
  return ns * 1e-9;
}

std::int64_t mean_boundary_bytes(const ChainCosts& chain) {
  std::int64_t bytes = 0;
  for (const StageCosts& stage : chain.stages) bytes += stage.output_bytes;
  return bytes / static_cast<std::int64_t>(chain.stages.size());
}

}  // namespace

ProfileBook::ProfileBook(const Chain& chain, Load load, std::optional<at::ScalarType> half,
                         std::optional<at::ScalarType> compute, std::string spill_dir,
                         std::string cache_folder, std::string cache_key)
    : chain_(chain),
      load_(std::move(load)),
      half_(half),
      compute_(compute),
      spill_dir_(std::move(spill_dir)),
      cache_folder_(std::move(cache_folder)),
      cache_key_(std::move(cache_key)),
      can_count_(chain.runs_without_memory() && !compute) {
  if (!cache_folder_.empty()) read_cache();
}

bool ProfileBook::measure(std::int64_t num_samples) {
  if (is_measured(num_samples)) return true;
  if (!may_fit(num_samples)) return false;
  std::optional<ChainProfile> profile;
  try {
    const auto start = DeviceClock::now();
    const MicroBatch micro = load_(num_samples);
    load_ns_[num_samples] =
        std::chrono::duration_cast<std::chrono::nanoseconds>(DeviceClock::now() - start).count();
    // What is counted has been compared with what was measured at another size.
    const ChainProfile* bytes = measured_.empty() ? nullptr : counted(num_samples);
    StagewiseScope weights(pager_, chain_.size());
    profile = profile_chain(
        chain_, micro, half_, compute_, throw_if_stopped,
        [&](std::size_t stage) { weights.before(stage); }, bytes);
  } catch (const c10::OutOfMemoryError&) {
    profile.reset();
  }
  if (!profile) {
    smallest_failure_ = num_samples;
    return false;
  }
  // Elsewhere than on a terminal, a budget that cannot be met gives one line and no more.
  if (profile->is_timed && isatty(STDERR_FILENO) != 0) {
    log_info(fmt::format("profiling {} distinct stages of {} at micro-batch {}: {} s",
                         profile->num_distinct, chain_.size(), num_samples,
                         format_figure(profile->seconds)));
  }
  seconds_ += profile->seconds;
  if (profile->is_timed) {
    const ChainProfile* bytes = counted(num_samples);
    can_count_ = bytes != nullptr && agree(*profile, *bytes);
  }
  add_boundary_formats(*profile);
  measured_[num_samples] = std::move(*profile);
  return true;
}

void ProfileBook::page_with(StaticPager* pager) {
  if (pager_ == pager) return;
  pager_ = pager;
  smallest_failure_.reset();
  for (auto entry = measured_.begin(); entry != measured_.end();)
    entry = entry->second.is_complete ? std::next(entry) : measured_.erase(entry);
}

// A small boundary costs more per byte than a large one, so that it is timed at its own size.
void ProfileBook::add_boundary_formats(ChainProfile& profile) {
  constexpr std::int64_t kLargeBytes = std::int64_t{1} << 20;
  if (spill_dir_.empty()) return;
  if (timed_boundary_bytes_ < kLargeBytes) {
    timed_boundary_bytes_ = mean_boundary_bytes(profile.grads_preallocated);
    boundary_formats_ = {measure_boundary_format(KeepAs::kDisk, timed_boundary_bytes_, spill_dir_)};
  }
  profile.grads_unallocated.boundary_formats = profile.grads_preallocated.boundary_formats =
      boundary_formats_;
}

std::int64_t ProfileBook::measure_smallest() {
  try {
    measure(1);
  } catch (const DataError&) {
    if (!chain_.whole()) throw;
    smallest_size_ = 2;
    measure(2);
  }
  return smallest_size_;
}

void ProfileBook::explore(std::int64_t num_samples) {
  // What may be spent in any case: half a second, or most of an update that takes long.
  constexpr double kAffordableSeconds = 0.5, kLongUpdateSeconds = 0.2, kShareOfUpdate = 0.75;
  // A sample of a micro-batch that is twice as large takes this part of its time or more: from
  // there on times are on a line.
  constexpr double kNoFaster = 0.97;
  double seconds_before = std::numeric_limits<double>::infinity();  // of an update
  // What an earlier run found enough is enough.
  const auto spent_seconds = [&] { return cached_seconds_ + seconds_; };
  for (std::int64_t size = measure_smallest(); size < num_samples; size *= 2) {
    if (!measure(size)) return;
    const double update_seconds = step_seconds(measured_.at(size)) *
                                  static_cast<double>(num_samples) / static_cast<double>(size);
    const bool knows_enough = size >= 4 && spent_seconds() > update_seconds;
    const bool knows_line =
        (size >= 4 || can_count_) && update_seconds > kNoFaster * seconds_before;
    const double affordable_seconds =
        update_seconds < kLongUpdateSeconds
            ? kAffordableSeconds
            : std::min(kAffordableSeconds, kShareOfUpdate * update_seconds);
    if (spent_seconds() > affordable_seconds && (knows_enough || knows_line)) return;
    seconds_before = update_seconds;
  }
  measure(num_samples);
}

const ChainProfile* ProfileBook::counted(std::int64_t num_samples) const {
  if (!can_count_) return nullptr;
  const auto found = counted_.find(num_samples);
  if (found != counted_.end()) return &found->second;
  if (sample_.num_samples == 0) {
    try {
      sample_ = load_(1);
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;
    }
    for (auto* tensors : {&sample_.inputs, &sample_.targets}) {
      for (at::Tensor& tensor : *tensors) tensor = shape_of(tensor);
    }
  }
  std::optional<ChainProfile> profile = count_chain(chain_, sample_, num_samples, half_);
  can_count_ = profile.has_value();
  return profile ? &(counted_[num_samples] = *std::move(profile)) : nullptr;
}

bool ProfileBook::counts_bytes() const {
  return measured_.size() >= 2 &&
         std::all_of(measured_.begin(), measured_.end(), [&](const auto& entry) {
           const ChainProfile* bytes = entry.second.is_timed ? counted(entry.first) : nullptr;
           return bytes != nullptr && agree(entry.second, *bytes);
         });
}

bool ProfileBook::is_known(std::int64_t num_samples) const {
  if (is_measured(num_samples)) return true;
  return counts_bytes() && measured_.begin()->first < num_samples &&
         measured_.rbegin()->first >= divide_up(num_samples, kFarthest);
}

std::int64_t ProfileBook::size_to_measure(std::int64_t num_samples) const {
  if (!can_count_ || num_samples < 2 * kFarthest) return num_samples;
  // The first of two to see whether counting is right is as small as will do.
  if (measured_.empty()) return divide_up(num_samples, 2 * kFarthest);
  const std::int64_t smaller = divide_up(num_samples, kFarthest);
  const bool will_do = counts_bytes() || (measured_.size() == 1 && !is_measured(smaller) &&
                                          measured_.begin()->second.is_timed);
  return will_do ? smaller : num_samples;
}

bool ProfileBook::know(std::int64_t num_samples) {
  while (!is_known(num_samples)) {
    if (!measure(size_to_measure(num_samples))) return false;
  }
  return true;
}

std::int64_t ProfileBook::load_ns(std::int64_t num_samples) const {
  if (load_ns_.empty()) return 0;
  auto nearest = load_ns_.lower_bound(num_samples);
  if (nearest == load_ns_.end()) --nearest;
  return static_cast<std::int64_t>(static_cast<double>(nearest->second) *
                                   static_cast<double>(num_samples) /
                                   static_cast<double>(nearest->first));
}

std::optional<double> ProfileBook::figure(const std::string& name,
                                          const std::function<std::optional<double>()>& measure) {
  const auto found = figures_.find(name);
  if (found != figures_.end()) return found->second;
  const std::optional<double> value = measure();
  if (value) figures_[name] = *value;
  return value;
}

ChainProfile ProfileBook::at(std::int64_t num_samples) const {
  const auto exact = measured_.find(num_samples);
  if (exact != measured_.end()) return exact->second;
  ChainProfile profile = on_line(num_samples);
  if (const ChainProfile* bytes = counted(num_samples)) take_bytes(profile, *bytes);
  return profile;
}

ChainProfile ProfileBook::on_line(std::int64_t num_samples) const {
  if (measured_.size() == 1) {
    const ChainProfile& only = measured_.begin()->second;
    return interpolate(empty_profile(only), only, num_samples);
  }
  auto upper = measured_.lower_bound(num_samples);
  if (upper == measured_.end()) upper = std::prev(measured_.end());
  if (upper == measured_.begin()) upper = std::next(upper);
  return interpolate(std::prev(upper)->second, upper->second, num_samples);
}

void ProfileBook::read_cache() {
  constexpr std::int64_t kMostBytes = 1 << 20;
  const std::string path = (fs::path(cache_folder_) / "index.txt").string();
  if (!path_exists(path)) return;
  try {
    std::istringstream index(InputFile(path).read_all(kMostBytes));
    std::string key;
    if (!std::getline(index, key) || key != cache_key_) return;
    std::string what;
    while (index >> what) {
      if (what == "seconds") {
        index >> cached_seconds_;
      } else if (what == "figure") {
        std::string name;
        double value = 0.0;
        const bool is_read = index >> value && std::getline(index >> std::ws, name);
        if (is_read && value > 0.0 && value < kLargestFigure) figures_[name] = value;
      } else if (what == "size") {
        read_cached_size(index);
      } else {
        return;  // of another version
      }
    }
  } catch (const Error& error) {
    log_warning(fmt::format("the cached profile in {} is not usable and is made anew: {}",
                            shown_path(cache_folder_), error.what()));
    measured_.clear();
    figures_.clear();
    cached_seconds_ = 0.0;
  }
}

void ProfileBook::read_cached_size(std::istream& index) {
  ChainProfile profile;
  std::int64_t load_ns = 0;
  if (!(index >> profile.num_samples >> profile.input_bytes >> load_ns)) return;
  if (profile.num_samples < 1) return;
  const auto costs = [&](const char* kind) {
    return read_chain_file(chain_file(cache_folder_, profile.num_samples, kind).string());
  };
  profile.grads_unallocated = costs("grads_unallocated");
  profile.grads_preallocated = costs("grads_preallocated");
  if (profile.grads_unallocated.stages.size() != chain_.size() ||
      profile.grads_preallocated.stages.size() != chain_.size())
    return;
  load_ns_[profile.num_samples] = load_ns;
  measured_[profile.num_samples] = std::move(profile);
}

// A cache that cannot be written costs a later run some time, and this one nothing.
void ProfileBook::save() const {
  if (cache_folder_.empty()) return;
  try {
    write_cache();
  } catch (const std::exception& error) {
    log_warning(fmt::format("the profile cannot be cached in {}: {}", shown_path(cache_folder_),
                            error.what()));
  }
}

void ProfileBook::write_cache() const {
  std::string index = fmt::format("{}\nseconds {}\n", cache_key_, cached_seconds_ + seconds_);
  for (const auto& [name, value] : figures_) index += fmt::format("figure {} {}\n", value, name);
  for (const auto& [size, profile] : measured_) {
    if (!profile.is_complete) continue;
    fs::create_directories(cache_folder_);
    write_file_atomically(chain_file(cache_folder_, size, "grads_unallocated").string(),
                          chain_json(profile.grads_unallocated).dump() + "\n");
    write_file_atomically(chain_file(cache_folder_, size, "grads_preallocated").string(),
                          chain_json(profile.grads_preallocated).dump() + "\n");
    index += fmt::format("size {} {} {}\n", size, profile.input_bytes, load_ns_.at(size));
  }
  if (fs::exists(cache_folder_))
    write_file_atomically((fs::path(cache_folder_) / "index.txt").string(), index);
}

}  // namespace headroom
