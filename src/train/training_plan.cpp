#include <headroom/train/training_plan.h>

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/log.h>
#include <headroom/data/split.h>
#include <headroom/execute/executor.h>
#include <headroom/execute/profile.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/policies.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace headroom {
namespace {

std::int64_t count_micro_batches(std::int64_t global_batch, std::int64_t micro_batch) { return (global_batch + micro_batch - 1) / micro_batch; }

// The plan of which nothing has to be known in advance.
TrainingPlan unmeasured_plan(const PlanningRequest& request, const Chain& chain) {
  TrainingPlan plan;
  plan.global_batch = request.global_batch;
  plan.micro_batch = request.fixed_micro_batch > 0 ? request.fixed_micro_batch : request.max_micro_batch;
  plan.num_micro_batches = count_micro_batches(plan.global_batch, plan.micro_batch);
  plan.operations = keep_everything(chain.size());
  return plan;
}

}  // namespace

TrainingPlan plan_training(const PlanningRequest& request, const Chain& chain) {
  if (request.budget_bytes == 0 && (request.policy.empty() || request.policy == "none")) return unmeasured_plan(request, chain);
  return unmeasured_plan(request, chain);
}

Json to_json(const TrainingPlan& plan) {
  Json json = Json::object();
  json.set("global_batch_size", plan.global_batch)
      .set("micro_batch_size", plan.micro_batch)
      .set("gradient_accumulation_steps", plan.num_micro_batches);
  return json;
}

std::string to_text(const TrainingPlan& plan) {
  return fmt::format("global batch {} = {} micro-batches of at most {}\n", plan.global_batch, plan.num_micro_batches, plan.micro_batch);
}

}  // namespace headroom
