#include "data/loader.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace headroom {

struct MicroBatchLoader::Queue {
  struct Loaded {
    MicroBatch batch;
    std::exception_ptr error;
  };

  Load load;
  bool prefetch = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::vector<std::int64_t>> requests;
  std::optional<Loaded> ready;
  std::uint64_t generation = 0;  // clear() makes what is being loaded for an older generation void
  bool loading = false;
  bool stop = false;
  std::thread thread;

  Loaded load_now(const std::vector<std::int64_t>& indices) const {
    Loaded loaded;
    try {
      loaded.batch = load(indices);
    } catch (...) {
      loaded.error = std::current_exception();
    }
    return loaded;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || (!ready && !requests.empty()); });
      if (stop) return;
      const std::vector<std::int64_t> indices = std::move(requests.front());
      requests.pop_front();
      const std::uint64_t started = generation;
      loading = true;
      lock.unlock();
      Loaded loaded = load_now(indices);
      lock.lock();
      loading = false;
      if (started == generation) ready = std::move(loaded);
      changed.notify_all();
    }
  }
};

MicroBatchLoader::MicroBatchLoader(Load load, bool prefetch) : queue_(std::make_unique<Queue>()) {
  queue_->load = std::move(load);
  queue_->prefetch = prefetch;
  if (prefetch) queue_->thread = std::thread([queue = queue_.get()] { queue->run(); });
}

MicroBatchLoader::~MicroBatchLoader() {
  if (!queue_->thread.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->stop = true;
  }
  queue_->changed.notify_all();
  queue_->thread.join();
}

void MicroBatchLoader::request(std::vector<std::int64_t> indices) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->requests.push_back(std::move(indices));
  queue_->changed.notify_all();
}

MicroBatch MicroBatchLoader::next() {
  std::unique_lock<std::mutex> lock(queue_->mutex);
  Queue::Loaded loaded;
  if (queue_->prefetch) {
    queue_->changed.wait(lock, [&] { return queue_->ready.has_value(); });
    loaded = std::move(*queue_->ready);
    queue_->ready.reset();
    queue_->changed.notify_all();
  } else {
    const std::vector<std::int64_t> indices = std::move(queue_->requests.front());
    queue_->requests.pop_front();
    loaded = queue_->load_now(indices);
  }
  if (loaded.error) std::rethrow_exception(loaded.error);
  return std::move(loaded.batch);
}

void MicroBatchLoader::clear() {
  std::unique_lock<std::mutex> lock(queue_->mutex);
  queue_->requests.clear();
  ++queue_->generation;
  queue_->changed.wait(lock, [&] { return !queue_->loading; });
  queue_->ready.reset();
}

}  // namespace headroom
