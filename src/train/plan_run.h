#pragma once

// One plan: measures the chain as far as needed, searches, and describes what was found.

#include <headroom/model/chain.h>
#include <headroom/train/run_plan.h>

#include "execute/static_pager.h"
#include "plan/paged_search.h"

#include "train/profile_book.h"
#include "train/run_settings.h"

#include <cstdint>
#include <optional>
#include <string>

namespace headroom {

/// What a plan is asked for, besides what the settings of the run say.
struct RunPlanRequest {
  std::int64_t window_samples = 1;     ///< over all ranks
  std::int64_t fixed_micro_batch = 0;  ///< 0: the planner chooses
  std::int64_t budget_bytes = 0;       ///< 0: none
  /// As --gradient_checkpointing; empty: keep everything, or optimal when there is a budget.
  std::string policy;
  std::int64_t slack_bytes = 0;        ///< of the budget, to be left free
  bool may_update_in_backward = true;  ///< where nothing else fits, and the settings allow it
  bool optimizer_is_allocated = false;
  /// Weights and whatever else stays, without the optimizer's state; nothing: what is live now.
  std::optional<std::int64_t> resident_bytes;
  /// That clipping and an update take; nothing: guessed from their bytes.
  std::optional<std::int64_t> update_ns;
  /// Times in training over times of stages that are measured one by one; nothing: found out by
  /// running the chosen schedule.
  std::optional<double> time_ratio;
  StaticPager* pager = nullptr;    ///< that may page weights, gradients and state; null: none may
  bool with_alternatives = false;  ///< also say what half and double the budget would give
};

/// Throws ConfigError when somebody asks for micro-batches below the global batch, or for several
/// ranks to share it, and parts of the batch would train another loss than the whole: the chain
/// couples samples and cannot be split, or it has BatchNorm besides. A micro-batch of 0 asks for
/// nothing.
void check_split(const Chain& chain, std::int64_t micro_batch, std::int64_t global_batch,
                 std::int64_t num_ranks);

/// Measures the chain as far as needed and plans for the largest share of a rank. A chain that
/// cannot be split stays whole, whatever the request says. Throws BudgetError, with the floor's
/// parts and the remedies, when nothing fits.
RunPlan plan_run(const RunPlanRequest& request, const RunSettings& settings, const Chain& chain,
                 ProfileBook& book);

/// The smallest budget with which the request's fixed_micro_batch can be trained; its own budget is
/// ignored. Throws BudgetError when that cannot even be measured.
std::int64_t smallest_budget(const RunPlanRequest& request, const RunSettings& settings,
                             const Chain& chain, ProfileBook& book);

/// The paged plan for the request's budget, from bytes that can be counted without memory; for a
/// budget of 0 the one at the paged floor. Its pager tells the units and is not asked to move any.
/// Nothing when none fits.
std::optional<PagedPlan> count_paged_plan(const RunPlanRequest& request,
                                          const RunSettings& settings, const Chain& chain,
                                          ProfileBook& book);

}  // namespace headroom
