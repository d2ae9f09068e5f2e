#include "train/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

namespace headroom {
namespace {

// The bits of a number, because text would round it.
std::uint64_t bits_of(double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

double from_bits(std::uint64_t bits) {
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void put_list(std::ostream& out, const std::vector<std::int64_t>& values) {
  out << ' ' << values.size();
  for (const std::int64_t value : values) out << ' ' << value;
}

std::vector<std::int64_t> take_list(std::istream& in) {
  std::size_t count = 0;
  in >> count;
  std::vector<std::int64_t> values(in ? count : 0);
  for (std::int64_t& value : values) in >> value;
  return values;
}

std::string pack(const ShareReport& report) {
  std::ostringstream out;
  out << static_cast<int>(report.outcome) << ' ' << bits_of(report.loss_sum) << ' '
      << report.cap_bytes << ' ' << (report.has_gradient.empty() ? "-" : report.has_gradient) << ' '
      << report.shapes.size();
  for (const std::vector<std::int64_t>& shape : report.shapes) put_list(out, shape);
  put_list(out, report.samples);
  out << '\n' << report.reason;
  return out.str();
}

ShareReport unpack(const std::string& bytes) {
  std::istringstream in(bytes);
  ShareReport report;
  int outcome = 0;
  std::uint64_t loss_bits = 0;
  std::size_t num_shapes = 0;
  in >> outcome >> loss_bits >> report.cap_bytes >> report.has_gradient >> num_shapes;
  report.outcome = static_cast<ShareOutcome>(outcome);
  report.loss_sum = from_bits(loss_bits);
  if (report.has_gradient == "-") report.has_gradient.clear();
  for (std::size_t i = 0; i < num_shapes; ++i) report.shapes.push_back(take_list(in));
  report.samples = take_list(in);
  in.get();  // the end of the line
  report.reason.assign(std::istreambuf_iterator<char>(in), {});
  return report;
}

// Nobody having said anything yet is not the same as all having all gradients.
void merge_gradients(std::string& all, const std::string& one, bool is_first) {
  if (is_first) {
    all = one;
  } else if (all.empty() || one.empty()) {
    all.clear();
  } else {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], one[i]);
  }
}

}  // namespace

ShareReport agree(Communicator& comm, const ShareReport& report) {
  const std::vector<std::string> messages = comm.gather(pack(report));
  ShareReport all;
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    ShareReport one = unpack(messages[rank]);
    all.outcome = std::max(all.outcome, one.outcome);
    all.loss_sum += one.loss_sum;
    if (one.cap_bytes > 0)
      all.cap_bytes = all.cap_bytes > 0 ? std::min(all.cap_bytes, one.cap_bytes) : one.cap_bytes;
    merge_gradients(all.has_gradient, one.has_gradient, rank == 0);
    if (!one.shapes.empty()) all.shapes = merged(all.shapes, one.shapes);
    if (all.samples.empty()) all.samples = std::move(one.samples);
    if (all.reason.empty() && !one.reason.empty()) {
      all.reason =
          messages.size() == 1 ? one.reason : fmt::format("on rank {}: {}", rank, one.reason);
    }
  }
  return all;
}

std::string pack_plan(const RunPlan& plan) {
  std::ostringstream out;
  out << plan.global_batch << ' ' << plan.num_ranks << ' ' << plan.is_predicted << ' '
      << plan.budget_bytes << ' ' << bits_of(plan.predicted_step_seconds) << ' '
      << bits_of(plan.time_ratio) << ' ' << static_cast<int>(plan.batch.gradients) << ' '
      << plan.batch.accumulation_steps << ' ' << plan.batch.peak_bytes << ' '
      << plan.batch.micro_batches.size();
  for (const PlannedMicroBatches& part : plan.batch.micro_batches) {
    out << ' ' << part.size << ' ' << part.count << ' ' << part.schedule.operations.size();
    for (const Operation& operation : part.schedule.operations) {
      out << ' ' << static_cast<int>(operation.kind) << ' ' << operation.stage << ' '
          << operation.option << ' ' << operation.format;
    }
  }
  return out.str();
}

RunPlan unpack_plan(const std::string& bytes) {
  std::istringstream in(bytes);
  RunPlan plan;
  std::uint64_t seconds_bits = 0, ratio_bits = 0;
  int gradients = 0;
  std::size_t num_parts = 0;
  in >> plan.global_batch >> plan.num_ranks >> plan.is_predicted >> plan.budget_bytes >>
      seconds_bits >> ratio_bits >> gradients >> plan.batch.accumulation_steps >>
      plan.batch.peak_bytes >> num_parts;
  plan.predicted_step_seconds = from_bits(seconds_bits);
  plan.time_ratio = from_bits(ratio_bits);
  plan.batch.gradients = static_cast<GradientMode>(gradients);
  for (std::size_t i = 0; i < num_parts; ++i) {
    PlannedMicroBatches part;
    std::size_t count = 0;
    in >> part.size >> part.count >> count;
    for (std::size_t j = 0; j < count; ++j) {
      int kind = 0;
      Operation operation;
      in >> kind >> operation.stage >> operation.option >> operation.format;
      operation.kind = static_cast<OperationKind>(kind);
      part.schedule.operations.push_back(operation);
    }
    plan.batch.micro_batches.push_back(std::move(part));
  }
  return plan;
}

}  // namespace headroom
