#include "data/read_ahead.h"

#include "core/thread_priority.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

namespace headroom {

struct ReadAhead::State {
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::duration<double>;
  struct Entry {
    enum class Stage { kWaiting, kBeingRead, kRead };
    Stage stage = Stage::kWaiting;
    bool is_needed = true;
    Bytes bytes;
    std::exception_ptr error;
  };
  using EntryPointer = std::shared_ptr<Entry>;

  Read read;
  std::int64_t most_bytes = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::int64_t, EntryPointer>> waiting;           // in the order of expect()
  std::unordered_map<std::int64_t, std::deque<EntryPointer>> entries;  // not yet taken
  std::int64_t num_bytes = 0;                                          // of what was read
  Duration usual_time{0};                                              // that a thread reads for
  bool stops = false;
  std::vector<std::thread> threads;

  void work() {
    give_way_to_computation();
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stops || (!waiting.empty() && num_bytes < most_bytes); });
      if (stops) return;
      const auto [sample, entry] = std::move(waiting.front());
      waiting.pop_front();
      if (entry->stage != Entry::Stage::kWaiting) continue;  // it was needed before its turn
      entry->stage = Entry::Stage::kBeingRead;
      lock.unlock();
      const Clock::time_point start = Clock::now();
      try {
        entry->bytes = read(sample);
      } catch (...) {
        entry->error = std::current_exception();
      }
      lock.lock();
      note_time(Clock::now() - start);
      entry->stage = Entry::Stage::kRead;
      if (entry->is_needed) num_bytes += static_cast<std::int64_t>(entry->bytes.size());
      changed.notify_all();
    }
  }

  void note_time(Duration time) {
    constexpr double kWeight = 1.0 / 16;
    usual_time += kWeight * (time - usual_time);
  }

  // How long to wait for a thread that has begun. Other processes may keep one of low priority from
  // its core for long.
  Duration patience() const { return std::chrono::milliseconds(10) + 2 * usual_time; }

  // The oldest entry of a sample, which is no longer among those to be taken; null: none.
  EntryPointer claim(std::int64_t sample) {
    const auto found = entries.find(sample);
    if (found == entries.end()) return nullptr;
    EntryPointer entry = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) entries.erase(found);
    return entry;
  }
};

ReadAhead::ReadAhead(Read read, std::int64_t num_workers, std::int64_t most_bytes)
    : state_(std::make_unique<State>()) {
  state_->read = std::move(read);
  state_->most_bytes = most_bytes;
  for (std::int64_t i = 0; i < num_workers; ++i)
    state_->threads.emplace_back([state = state_.get()] { state->work(); });
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stops = true;
  }
  state_->changed.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void ReadAhead::expect(const std::int64_t* samples, std::size_t count) {
  if (state_->threads.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    for (std::size_t i = 0; i < count; ++i) {
      auto entry = std::make_shared<State::Entry>();
      state_->entries[samples[i]].push_back(entry);
      state_->waiting.emplace_back(samples[i], std::move(entry));
    }
  }
  state_->changed.notify_all();
}

ReadAhead::Bytes ReadAhead::take(std::int64_t sample) {
  using Stage = State::Entry::Stage;
  std::unique_lock<std::mutex> lock(state_->mutex);
  const State::EntryPointer entry = state_->claim(sample);
  if (!entry || entry->stage == Stage::kWaiting) {
    if (entry) entry->stage = Stage::kBeingRead;  // so that no thread begins with it
    lock.unlock();
    return state_->read(sample);
  }
  if (!state_->changed.wait_for(lock, state_->patience(),
                                [&] { return entry->stage == Stage::kRead; })) {
    entry->is_needed = false;
    lock.unlock();
    return state_->read(sample);
  }
  state_->num_bytes -= static_cast<std::int64_t>(entry->bytes.size());
  state_->changed.notify_all();
  if (entry->error) std::rethrow_exception(entry->error);
  return std::move(entry->bytes);
}

}  // namespace headroom
