#include "train/timeline.h"
#include "report/json.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

Json by_owner(const MemoryUse& use) {
  Json owners = Json::object();
  for (std::size_t owner = 0; owner < kNumOwners; ++owner)
    owners.set(owner_name(static_cast<Owner>(owner)), use.live_by_owner[owner]);
  return owners;
}

}  // namespace

void Timeline::start() {
  current_.clear();
  highest_.clear();
  last_ = Clock::now();
  is_recording_ = true;
}

void Timeline::record(std::size_t operation, bool has_planned_size) {
  if (!is_recording_) return;
  const Clock::time_point begin = last_;
  last_ = Clock::now();
  if (!has_planned_size) return;
  if (operation == 0) keep_highest();  // the next micro-batch began
  current_.push_back({operation, begin, last_, MemoryMeter::instance().use()});
}

void Timeline::finish() {
  is_recording_ = false;
  keep_highest();
}

void Timeline::keep_highest() {
  const auto most = [](const std::vector<Point>& points) {
    std::int64_t bytes = -1;
    for (const Point& point : points) bytes = std::max(bytes, point.use.live_bytes);
    return bytes;
  };
  if (most(current_) > most(highest_)) highest_.swap(current_);
  current_.clear();
}

Json Timeline::points() const {
  Json points = Json::array();
  for (const Point& point : highest_) {
    points.push(Json::object()
                    .set("operation", static_cast<std::int64_t>(point.operation))
                    .set("live_bytes", point.use.live_bytes)
                    .set("by_owner", by_owner(point.use)));
  }
  return points;
}

Json Timeline::trace(const RunPlan& plan, const std::vector<TransferRecord>& transfers) const {
  const std::vector<Operation>& operations = plan.batch.largest().schedule.operations;
  const auto microseconds = [](Clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
  };
  Json events = Json::array();
  for (const Point& point : highest_) {
    const Operation& operation = operations.at(point.operation);
    const std::string& stage = plan.costs.stages.at(static_cast<std::size_t>(operation.stage)).name;
    events.push(Json::object()
                    .set("name", fmt::format("{} {}", operation_name(operation.kind), stage))
                    .set("ph", "X")
                    .set("ts", microseconds(point.begin - highest_.front().begin))
                    .set("dur", microseconds(point.end - point.begin))
                    .set("pid", 1)
                    .set("tid", 1));
    events.push(Json::object()
                    .set("name", "tensor bytes")
                    .set("ph", "C")
                    .set("ts", microseconds(point.end - highest_.front().begin))
                    .set("pid", 1)
                    .set("args", by_owner(point.use)));
  }
  for (const TransferRecord& transfer : transfers) {
    if (highest_.empty() || transfer.end < highest_.front().begin ||
        transfer.begin > highest_.back().end)
      continue;
    events.push(Json::object()
                    .set("name", transfer.kind == TransferKind::kRead ? "disk read" : "disk write")
                    .set("ph", "X")
                    .set("ts", microseconds(transfer.begin - highest_.front().begin))
                    .set("dur", microseconds(transfer.end - transfer.begin))
                    .set("pid", 1)
                    .set("tid", 2)
                    .set("args", Json::object().set("bytes", transfer.num_bytes)));
  }
  return Json::object().set("displayTimeUnit", "ms").set("traceEvents", events);
}

}  // namespace headroom
