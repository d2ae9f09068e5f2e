#include "core/carried_regions.h"

#include "core/object_imports.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <unordered_map>
#include <vector>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;
using Body = void (*)(void*);

constexpr std::chrono::milliseconds kPatience{20};

// One parallel region that is carried. Lives on the stack of the thread that began it.
class Region {
 public:
  Region(Body of_part, void* data, int count) : body_(of_part), data_(data), num_parts_(count) {}

  Body body() const { return body_; }
  int num_parts() const { return num_parts_; }
  bool has_waited_long() const { return Clock::now() - began_ > kPatience; }

  // The number of a part that nobody has begun; none: num_parts() or more.
  int claim() { return next_part_++; }
  void run(int part);
  void run_what_is_left() {
    for (int part = claim(); part < num_parts_; part = claim()) run(part);
  }
  void wait_for_all() const {
    while (num_done_ < num_parts_) sched_yield();
  }
  void wait_at_barrier() {
    const int round = round_;
    if (++num_waiting_ == num_parts_) {
      num_waiting_ = 0;
      ++round_;
    } else {
      while (round_ == round) sched_yield();
    }
  }

 private:
  Body body_;
  void* data_;
  int num_parts_;
  Clock::time_point began_ = Clock::now();
  std::atomic<int> next_part_{0};
  std::atomic<int> num_done_{0};
  std::atomic<int> num_waiting_{0};  // at the barrier
  std::atomic<int> round_{0};
};

// The part that this thread runs.
struct Place {
  Region* region = nullptr;
  int part = 0;
};
thread_local Place place;

void Region::run(int part) {
  const Place before = place;
  place = {this, part};
  body_(data_);
  place = before;
  ++num_done_;  // from here on the region may be gone
}

// What is under way, and what was learnt of the regions of this process.
struct Carrying {
  std::mutex mutex;
  int num_carriers = 0;
  std::vector<Region*> under_way;
  std::unordered_map<Body, bool> may_be_carried;
};

Carrying& carrying() {
  static Carrying instance;
  return instance;
}

// A copy of Carrying::num_carriers that can be read at every region.
std::atomic<int> num_carriers{0};

// The function of OpenMP's runtime that one of ours stands before.
template <class Function>
Function* behind(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int num_threads_of_team() {
  static const auto get = behind<int()>("omp_get_max_threads");
  return get();
}

bool is_in_team() {
  static const auto get = behind<int()>("omp_in_parallel");
  return get() != 0;
}

// Where one of these is called, or none, parts need no team. Others ask the team for its state.
bool uses_regions_alone(Body body) {
  constexpr std::array<const char*, 9> kKnown = {
      "GOMP_parallel",       "GOMP_barrier",       "omp_get_thread_num",
      "omp_get_num_threads", "omp_in_parallel",    "omp_get_max_threads",
      "omp_set_num_threads", "omp_get_num_places", "omp_get_num_procs"};
  const auto imports = imports_of(reinterpret_cast<const void*>(body), {"GOMP_", "omp_"});
  return imports && std::all_of(imports->begin(), imports->end(), [&](const std::string& name) {
           return std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end();
         });
}

bool begin_carrying(Region& region) {
  Carrying& state = carrying();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.num_carriers == 0) return false;
  const auto known = state.may_be_carried.find(region.body());
  const bool may_be_carried =
      known != state.may_be_carried.end()
          ? known->second
          : (state.may_be_carried[region.body()] = uses_regions_alone(region.body()));
  if (may_be_carried) state.under_way.push_back(&region);
  return may_be_carried;
}

void end_carrying(Region& region) {
  Carrying& state = carrying();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.under_way.erase(std::find(state.under_way.begin(), state.under_way.end(), &region));
}

void run_parts_of(void* region) { static_cast<Region*>(region)->run_what_is_left(); }

void run_region(Body body, void* data, unsigned num_threads, unsigned flags) {
  static const auto run_by_team = behind<void(Body, void*, unsigned, unsigned)>("GOMP_parallel");
  if (place.region != nullptr) {  // inside a part: a team of one, as OpenMP would have it
    Region(body, data, 1).run(0);
    return;
  }
  const int carriers = num_carriers;
  if (carriers > 0 && !is_in_team()) {
    const int num_parts = num_threads > 0 ? static_cast<int>(num_threads) : num_threads_of_team();
    Region region(body, data, num_parts);
    if (num_parts > carriers && begin_carrying(region)) {
      if (carriers > 1) run_by_team(run_parts_of, &region, static_cast<unsigned>(carriers), flags);
      region.run_what_is_left();
      region.wait_for_all();
      return end_carrying(region);
    }
  }
  run_by_team(body, data, num_threads, flags);
}

// Whether calls of OpenMP come to the functions below, also those of libraries.
bool stands_before_openmp() {
  return dlsym(RTLD_DEFAULT, "GOMP_parallel") != behind<void>("GOMP_parallel") &&
         behind<void>("GOMP_parallel") != nullptr;
}

// A thread for each part that has not begun of a region that others wait in.
std::vector<std::thread> threads_for_waiting_regions(Carrying& state) {
  std::vector<std::thread> threads;
  for (Region* region : state.under_way) {
    if (!region->has_waited_long()) continue;
    for (int part = region->claim(); part < region->num_parts(); part = region->claim()) {
      state.may_be_carried[region->body()] = false;
      threads.emplace_back([region, part] { region->run(part); });
    }
  }
  return threads;
}

}  // namespace

CarriedRegions::CarriedRegions(int carriers) {
  if (!stands_before_openmp()) return;
  relief_ = std::thread([this] { relieve(); });
  Carrying& state = carrying();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.num_carriers = carriers;
  num_carriers = carriers;
}

CarriedRegions::~CarriedRegions() {
  if (!relief_.joinable()) return;
  Carrying& state = carrying();
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.num_carriers = 0;
    num_carriers = 0;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
  }
  ended_.notify_one();
  relief_.join();
}

// Looks every few milliseconds, and until the last region has ended.
void CarriedRegions::relieve() {
  Carrying& state = carrying();
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool is_under_way = false; !has_ended_ || is_under_way;) {
    if (has_ended_) {
      std::this_thread::sleep_for(kPatience / 4);
    } else {
      ended_.wait_for(lock, kPatience / 2, [this] { return has_ended_; });
    }
    std::vector<std::thread> threads;
    {
      const std::lock_guard<std::mutex> regions(state.mutex);
      threads = threads_for_waiting_regions(state);
      is_under_way = !state.under_way.empty();
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace headroom

// They stand before the functions of GNU's runtime, for the program and every library that it
// loads, and call them. Weak, so that a program may link the runtime statically.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads,
                                         unsigned flags) {
  headroom::run_region(body, data, num_threads, flags);
}

__attribute__((weak)) void GOMP_barrier() {
  static const auto wait = headroom::behind<void()>("GOMP_barrier");
  if (headroom::place.region != nullptr) return headroom::place.region->wait_at_barrier();
  wait();
}

__attribute__((weak)) int omp_get_thread_num() {
  static const auto get = headroom::behind<int()>("omp_get_thread_num");
  return headroom::place.region != nullptr ? headroom::place.part : get();
}

__attribute__((weak)) int omp_get_num_threads() {
  static const auto get = headroom::behind<int()>("omp_get_num_threads");
  return headroom::place.region != nullptr ? headroom::place.region->num_parts() : get();
}

__attribute__((weak)) int omp_in_parallel() {
  static const auto get = headroom::behind<int()>("omp_in_parallel");
  return headroom::place.region != nullptr ? 1 : get();
}
}
