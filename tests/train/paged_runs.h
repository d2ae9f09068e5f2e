#pragma once

// Small training runs that page weights, gradients and optimizer state.

#include "execute/static_pager.h"
#include "plan/paged_search.h"
#include "train/budget_runs.h"
#include "train/run_settings.h"

#include <cstdint>
#include <optional>
#include <string>

namespace headroom {

inline constexpr const char* kPagedGpt =
    "n_layer=4,n_head=2,n_embd=64,block_size=16,vocab_size=256,dropout=0.1";

struct PagedCase {
  RunCase run;
  double max_grad_norm = 1.0;
  bool fp16 = false;
  int num_budgets = 12;
};

inline TrainingArguments arguments_of(const PagedCase& test, std::int64_t budget,
                                      const std::string& folder) {
  TrainingArguments arguments = arguments_of(test.run, budget, folder);
  std::filesystem::create_directories(folder);
  arguments.max_grad_norm = test.max_grad_norm;
  arguments.fp16 = test.fp16;
  if (test.fp16) arguments.half_precision_backend = "keep";
  if (budget > 0) arguments.spill_dir = folder;
  return arguments;
}

inline TrainResults train(const PagedCase& test, std::int64_t budget, const std::string& folder) {
  return PreparedRun(test.run, arguments_of(test, budget, folder)).trainer->train();
}

// The least with everything paged.
inline std::int64_t paged_floor_of(const PagedCase& test, const std::string& folder) {
  const TrainingArguments arguments = arguments_of(test, std::int64_t{1} << 40, folder);
  const RunPlan plan = PreparedRun(test.run, arguments).trainer->plan();
  seed_everything(1);
  const ZooModel model = make_model(test.run.model, test.run.config);
  const RunSettings settings(arguments, 1);
  const StaticPager pager(model.chain, folder, settings.state_bytes_of_parameter(),
                          has_independent_elements(settings.optimizer.name));
  PagedRequest request;
  request.num_samples = test.run.global_batch;
  request.micro_batch_size = test.run.micro_batch;
  request.units = pager.units();
  request.resident_bytes = plan.bytes_by_owner.at("weights") + plan.bytes_by_owner.at("other");
  for (const PageUnit& unit : request.units)
    request.resident_bytes -= unit.bytes_of(PageKind::kWeights);
  request.costs = [&](std::int64_t) -> std::optional<PagedCosts> {
    const ChainCosts costs = with_gradients_allocated(plan.costs);
    return PagedCosts{costs, costs, plan.batch.input_bytes};
  };
  return paged_floor(request).value();
}

// A budget in the middle of what is paged.
inline std::int64_t middle_budget(const PagedCase& test, const std::string& folder) {
  const TrainResults plain = train(test, 0, folder);
  const std::int64_t floor = paged_floor_of(test, folder);
  return floor + (plain.peak_memory_bytes - floor) / 4;
}

}  // namespace headroom
