#include <headroom/execute/checkpoint.h>

#include "plan/segments.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

std::vector<CheckpointSegment> split(std::size_t num_layers, std::int64_t num_segments) {
  const auto all = static_cast<std::int64_t>(num_layers);
  num_segments = std::min(num_segments, all);
  const auto begin_of = [&](std::int64_t segment) {
    return static_cast<std::size_t>(segment_begin(all, num_segments, segment));
  };
  std::vector<CheckpointSegment> segments;
  for (std::int64_t i = 0; i < num_segments; ++i)
    segments.push_back({begin_of(i), begin_of(i + 1), true, {}});
  return segments;
}

std::vector<CheckpointSegment> halve(std::size_t begin, std::size_t end) {
  if (end - begin == 1) return {{begin, end, true, {}}};
  const std::size_t middle =
      begin + static_cast<std::size_t>(first_half(static_cast<std::int64_t>(end - begin)));
  std::vector<CheckpointSegment> halves = {{begin, middle, true, {}}, {middle, end, true, {}}};
  for (CheckpointSegment& half : halves) {
    if (half.end - half.begin > 1) half.inner = halve(half.begin, half.end);
  }
  return halves;
}

std::vector<CheckpointSegment> cut_at(const std::vector<std::int64_t>& cut_points,
                                      std::size_t num_layers) {
  std::vector<CheckpointSegment> segments;
  std::size_t begin = 0;
  for (const std::int64_t cut : cut_points) {
    if (cut <= static_cast<std::int64_t>(begin) || cut >= static_cast<std::int64_t>(num_layers)) {
      throw ConfigError(
          fmt::format("cut point {} of a chain of {} layers: cut points must increase from 1 to {}",
                      cut, num_layers, num_layers - 1));
    }
    segments.push_back({begin, static_cast<std::size_t>(cut), true, {}});
    begin = static_cast<std::size_t>(cut);
  }
  segments.push_back({begin, num_layers, true, {}});
  return segments;
}

}  // namespace

CheckpointStrategy::CheckpointStrategy(std::int64_t num_segments)
    : kind_(Kind::kCount), num_segments_(num_segments) {
  if (num_segments < 1)
    throw ConfigError(fmt::format("{} checkpoint segments: at least 1 is needed", num_segments));
}

CheckpointStrategy::CheckpointStrategy(std::vector<std::int64_t> cut_points)
    : kind_(Kind::kCuts), cut_points_(std::move(cut_points)) {}

CheckpointStrategy CheckpointStrategy::every() { return CheckpointStrategy(Kind::kEvery); }
CheckpointStrategy CheckpointStrategy::sqrt() { return CheckpointStrategy(Kind::kSqrt); }
CheckpointStrategy CheckpointStrategy::log() { return CheckpointStrategy(Kind::kLog); }

CheckpointStrategy& CheckpointStrategy::checkpoint_last(bool on) {
  checkpoint_last_ = on;
  return *this;
}

std::vector<CheckpointSegment> CheckpointStrategy::segments(std::size_t num_layers) const {
  if (num_layers == 0) throw ConfigError("an empty Sequential has nothing to checkpoint");
  std::vector<CheckpointSegment> segments;
  switch (kind_) {
    case Kind::kEvery:
      segments = split(num_layers, static_cast<std::int64_t>(num_layers));
      break;
    case Kind::kCount:
      segments = split(num_layers, num_segments_);
      break;
    case Kind::kCuts:
      segments = cut_at(cut_points_, num_layers);
      break;
    case Kind::kSqrt:
      segments = split(num_layers, num_sqrt_segments(static_cast<std::int64_t>(num_layers)));
      break;
    case Kind::kLog:
      segments = halve(0, num_layers);
      break;
  }
  segments.back().is_checkpointed = checkpoint_last_;
  return segments;
}

std::string detail::segment_name(const CheckpointSegment& segment) {
  return segment.end - segment.begin == 1
             ? fmt::format("layer {}", segment.begin)
             : fmt::format("layers {} to {}", segment.begin, segment.end - 1);
}

}  // namespace headroom
