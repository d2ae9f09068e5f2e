#pragma once

#include <headroom/execute/checkpoint.h>

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Layers [begin, end) of a Sequential that are checkpointed as one; inside, `inner` segments
/// again, or nothing.
struct CheckpointSegment {
  std::size_t begin;
  std::size_t end;
  bool is_checkpointed = true;
  std::vector<CheckpointSegment> inner;
};

/// Which layers of a chain to checkpoint together. For n equal layers of which one keeps `a` bytes,
/// `b` of them its input:
///
/// | strategy   | peak                          | extra forwards |
/// | every      | n b + a                       | 1              |
/// | segments K | K b + a n / K                 | 1              |
/// | sqrt       | as segments, with K = sqrt(n) | 1              |
/// | log        | b log2(n) + a                 | log2(n)        |
class CheckpointStrategy {
 public:
  /// `num_segments` segments of equal length, as far as that goes; more than there are layers means
  /// one per layer. Throws ConfigError below 1.
  CheckpointStrategy(std::int64_t num_segments);  // NOLINT(google-explicit-constructor)
  CheckpointStrategy(int num_segments)
      : CheckpointStrategy(std::int64_t{num_segments}) {}  // NOLINT(google-explicit-constructor)
  /// A segment begins at each cut point, and at layer 0. They must increase and lie inside of the
  /// chain: segments() throws ConfigError.
  CheckpointStrategy(std::vector<std::int64_t> cut_points);  // NOLINT(google-explicit-constructor)

  static CheckpointStrategy every();
  static CheckpointStrategy sqrt();
  /// Halves, checkpointed inside of halves, down to single layers.
  static CheckpointStrategy log();

  /// Without its last segment checkpointed a chain needs less time, and no more memory where
  /// backward follows at once.
  CheckpointStrategy& checkpoint_last(bool on);

  std::vector<CheckpointSegment> segments(std::size_t num_layers) const;

 private:
  enum class Kind { kEvery, kCount, kCuts, kSqrt, kLog };
  explicit CheckpointStrategy(Kind kind) : kind_(kind) {}

  Kind kind_;
  std::int64_t num_segments_ = 0;
  std::vector<std::int64_t> cut_points_;
  bool checkpoint_last_ = true;
};

namespace detail {

std::string segment_name(const CheckpointSegment& segment);

using SharedSequential = std::shared_ptr<torch::nn::SequentialImpl>;

template <typename... Inputs>
torch::nn::AnyValue run_segments(const SharedSequential& layers,
                                 const std::vector<CheckpointSegment>& segments, Inputs... inputs);

template <typename... Inputs>
torch::nn::AnyValue run_segment(const SharedSequential& layers, const CheckpointSegment& segment,
                                Inputs... inputs) {
  if (!segment.inner.empty()) return run_segments(layers, segment.inner, std::move(inputs)...);
  auto layer = layers->begin() + static_cast<std::ptrdiff_t>(segment.begin);
  torch::nn::AnyValue value = layer->any_forward(std::move(inputs)...);
  for (std::size_t i = segment.begin + 1; i < segment.end; ++i)
    value = (++layer)->any_forward(std::move(value));
  return value;
}

template <typename... Inputs>
torch::nn::AnyValue run_maybe_checkpointed(const SharedSequential& layers,
                                           const CheckpointSegment& segment, Inputs... inputs) {
  if (!segment.is_checkpointed) return run_segment(layers, segment, std::move(inputs)...);
  CheckpointOptions options;
  options.name = segment_name(segment);
  const auto run = [layers, segment](Inputs... again) {
    return run_segment(layers, segment, std::move(again)...);
  };
  return checkpoint(options, run, std::move(inputs)...);
}

// The first segment takes what the caller passes, each other one what the segment before returned.
template <typename... Inputs>
torch::nn::AnyValue run_segments(const SharedSequential& layers,
                                 const std::vector<CheckpointSegment>& segments, Inputs... inputs) {
  torch::nn::AnyValue value =
      run_maybe_checkpointed(layers, segments.front(), std::move(inputs)...);
  for (std::size_t i = 1; i < segments.size(); ++i)
    value = run_maybe_checkpointed(layers, segments[i], std::move(value));
  return value;
}

}  // namespace detail

/// sequential->forward(inputs...) with its layers checkpointed in segments:
///
///     y = headroom::checkpoint_sequential(sequential, 4, x);
///     y = headroom::checkpoint_sequential(sequential, headroom::CheckpointStrategy::sqrt(), x);
///
/// Layers may hand on tuples or vectors of tensors. `Result` is what the last layer returns. Throws
/// ConfigError for an empty Sequential.
template <typename Result = at::Tensor, typename... Inputs>
Result checkpoint_sequential(const torch::nn::Sequential& sequential,
                             const CheckpointStrategy& strategy, Inputs&&... inputs) {
  const std::vector<CheckpointSegment> segments = strategy.segments(sequential->size());
  return detail::run_segments<std::decay_t<Inputs>...>(sequential.ptr(), segments,
                                                       std::forward<Inputs>(inputs)...)
      .template get<Result>();
}

}  // namespace headroom
