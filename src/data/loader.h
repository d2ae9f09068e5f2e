#pragma once

#include <headroom/core/micro_batch.h>

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace headroom {

/// Loads micro-batches in the order in which they were requested; with prefetch, one ahead on a
/// thread of its own, so that at most two micro-batches are in memory.
class MicroBatchLoader {
 public:
  using Load = std::function<MicroBatch(c10::ArrayRef<std::int64_t> indices)>;

  /// `load` is called on the loader's thread when `prefetch` is set.
  MicroBatchLoader(Load load, bool prefetch);
  ~MicroBatchLoader();
  MicroBatchLoader(const MicroBatchLoader&) = delete;
  MicroBatchLoader& operator=(const MicroBatchLoader&) = delete;

  void request(std::vector<std::int64_t> indices);
  /// The oldest request that was not yet handed out. Throws what loading threw. Must not be called
  /// without a request.
  MicroBatch next();
  /// Forgets every request.
  void clear();

 private:
  struct Queue;
  std::unique_ptr<Queue> queue_;
};

}  // namespace headroom
