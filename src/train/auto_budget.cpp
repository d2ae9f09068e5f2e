#include "train/auto_budget.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/available_memory.h"
#include "core/library_buffers.h"
#include "core/log.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

// A BLAS that gets no addresses for its buffers may try for ever.
void check_addresses() {
  constexpr std::int64_t kLeast = std::int64_t{256} << 20;
  const AvailableMemory available = available_memory();
  if (!available.is_address_space || available.bytes >= kLeast) return;
  throw BudgetError(
      fmt::format("--memory_budget auto: {} leaves {}, but the libraries alone need {}: raise it",
                  available.source, format_bytes(available.bytes), format_bytes(kLeast)));
}

}  // namespace

void settle_budget(TrainingArguments& arguments, std::int64_t num_local_ranks) {
  if (!arguments.memory_budget_auto || arguments.memory_budget_bytes > 0) return;
  check_addresses();
  make_library_buffers();
  MemoryMeter& meter = MemoryMeter::instance();
  meter.trim();
  const AvailableMemory available = available_memory();
  // Beside tensors a run takes plans, files, messages and the heap's gaps, which grow with what is
  // there; each thread that is still to be started takes a stack and a heap of its own addresses.
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const std::int64_t program_bytes =
      std::max<std::int64_t>(0, resident_bytes() - meter.live_bytes());
  std::int64_t reserve = 64 * kMiB + program_bytes / 4;
  if (available.is_address_space) reserve += 80 * kMiB * (2 + arguments.dataloader_num_workers);
  const std::int64_t share = available.bytes / std::max<std::int64_t>(1, num_local_ranks);
  const std::int64_t budget = share - reserve + meter.live_bytes();
  if (share <= reserve) {
    throw BudgetError(fmt::format(
        "--memory_budget auto: {} leaves {} beside the {} that the program itself takes, and {} "
        "are "
        "kept free: nothing is left for tensors",
        available.source, format_bytes(share), format_bytes(program_bytes), format_bytes(reserve)));
  }
  arguments.memory_budget_bytes = budget;
  log_info(fmt::format(
      "memory budget: {} ({} gives {}{}, beside the {} that the program takes; {} are kept free)",
      format_bytes(budget), available.source, format_bytes(share),
      num_local_ranks > 1 ? fmt::format(" to each of {} ranks", num_local_ranks) : "",
      format_bytes(program_bytes), format_bytes(reserve)));
}

}  // namespace headroom
