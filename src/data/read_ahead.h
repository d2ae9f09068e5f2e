#pragma once

// Samples that take time to read, read by threads ahead of their use.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace headroom {

/// Reads samples on `num_workers` threads before they are asked for. Which thread reads a sample,
/// and when, never changes what take() returns. Safe from several threads.
class ReadAhead {
 public:
  using Bytes = std::vector<std::uint8_t>;
  /// Called on any thread. What it throws is thrown by take().
  using Read = std::function<Bytes(std::int64_t sample)>;

  /// Samples that were read and not yet taken have at most `most_bytes`, and one more sample for
  /// each thread. Without workers, take() reads.
  ReadAhead(Read read, std::int64_t num_workers, std::int64_t most_bytes = kMostBytes);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// These will be taken soon, in about this order, after those that were expected before. A sample
  /// may be expected several times.
  void expect(const std::int64_t* samples, std::size_t count);

  /// The bytes of a sample: read ahead, or now where no thread has begun with it or one takes long.
  /// Threads give way to those that compute.
  Bytes take(std::int64_t sample);

 private:
  static constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headroom
