#include <headroom/train/estimate.h>

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/autocast.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "core/tensor_storage.h"
#include "memory/shape_meter.h"
#include "model/requested_model.h"

#include "train/plan_run.h"
#include "train/run_settings.h"

#include <torch/torch.h>

#include <algorithm>

namespace headroom {
namespace {

// Some tensors of a model are made on the CPU wherever the others are (a counter of BatchNorm):
// they become shapes, too.
ZooModel build_shapes(const TrainingArguments& arguments) {
  ZooModel model = [&] {
    const ShapeOnlyScope scope;
    return make_requested_model(arguments);
  }();
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : model.chain.named_tensors()) tensors.push_back(tensor);
  MetaSwapScope(tensors).keep();
  return model;
}

MicroBatch shapes_of_samples(const ModelInput& input, std::int64_t num_samples) {
  const auto numbers = torch::dtype(torch::kLong).device(torch::kMeta);
  if (input.kind == ModelInput::Kind::kTokens) {
    const at::Tensor tokens = torch::empty({num_samples, input.length}, numbers);
    if (input.num_masked == 0)
      return {{tokens}, {torch::empty_like(tokens)}, num_samples, num_samples * input.length};
    const at::Tensor targets = torch::empty({num_samples, input.num_masked}, numbers);
    return {{tokens},
            {targets, torch::empty_like(targets)},
            num_samples,
            num_samples * input.num_masked};
  }
  const at::Tensor images = torch::empty({num_samples, input.channels, input.rows, input.columns},
                                         torch::dtype(torch::kFloat).device(torch::kMeta));
  if (input.kind == ModelInput::Kind::kImages)
    return {{images}, {torch::empty({num_samples}, numbers)}, num_samples, num_samples};
  return {{images, torch::empty({num_samples, input.length}, numbers),
           torch::empty({num_samples, 1}, numbers)},
          {},
          num_samples,
          num_samples};
}

MicroBatch shapes_of_samples(const MicroBatch& like, std::int64_t num_samples) {
  MicroBatch shapes = like;
  for (auto* tensors : {&shapes.inputs, &shapes.targets}) {
    for (at::Tensor& tensor : *tensors) {
      std::vector<std::int64_t> sizes = tensor.sizes().vec();
      sizes.at(0) = num_samples;
      tensor = torch::empty(sizes, tensor.options().device(torch::kMeta));
    }
  }
  shapes.num_items = like.num_items / like.num_samples * num_samples;
  shapes.num_samples = num_samples;
  return shapes;
}

constexpr std::int64_t kNumCompared = 2;  // batch norms refuse a single value per channel

// The first samples, from the beginning again where there are too few.
MicroBatch load_first(const Dataset& data, std::int64_t num_samples) {
  std::vector<std::int64_t> indices;
  for (std::int64_t i = 0; i < num_samples; ++i) indices.push_back(i % data.size());
  return data.load(indices);
}

std::vector<at::Tensor> tensors_of(const Chain& chain) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : chain.named_tensors()) tensors.push_back(tensor);
  return tensors;
}

// Whether every operation of the chain runs on shapes alone, and then takes the bytes that it takes
// when it runs.
bool can_be_counted(const Chain& chain, const MicroBatch& sample,
                    const std::vector<at::Tensor>& tensors) {
  std::optional<ChainProfile> counted;
  try {
    ShapeMeter::instance();
    const MetaSwapScope without_memory(tensors);
    counted = profile_chain(chain, shapes_of_samples(sample, sample.num_samples));
  } catch (const DataError&) {  // of an operator that has no shapes, or reads values
    release_failed_backward();
  } catch (const c10::Error&) {
    release_failed_backward();
  }
  if (!counted) return false;
  const std::optional<ChainProfile> measured = profile_chain(chain, sample);
  return measured && agree(*measured, *counted);
}

// Half precision is counted as kept, which is what the arguments must mean here.
TrainingArguments with_fixed_precision(TrainingArguments arguments) {
  if (!arguments.fp16 && !arguments.bf16) return arguments;
  const at::ScalarType type = arguments.fp16 ? at::kHalf : at::kBFloat16;
  std::string& backend = arguments.half_precision_backend;
  if (backend == "autocast" ||
      (backend == "auto" && choose_half_precision(c10::Device(arguments.device), type).autocast)) {
    throw ConfigError(
        "estimate counts activations in fp32 or kept in half precision, not computed in it; add "
        "--half_precision_backend keep, "
        "or ask headroom plan");
  }
  backend = "keep";
  return arguments;
}

// A model that is counted, or measured one stage at a time.
struct EstimatedModel {
  const Chain& chain;
  std::int64_t weights_bytes;
  ProfileBook::Load load;        // on the meta device, where bytes are counted
  bool is_measured = false;      // the model has memory, and runs
  std::int64_t other_bytes = 0;  // of memory that lives beside the weights, while it trains too
};

class Estimator {
 public:
  Estimator(const TrainingArguments& arguments, const EstimatedModel& model)
      : arguments_(with_fixed_precision(arguments)),
        settings_(arguments_, arguments.nproc_per_node),
        chain_(model.chain),
        weights_bytes_(model.weights_bytes),
        is_measured_(model.is_measured),
        book_(chain_, model.load, settings_.precision.keep_in_half, std::nullopt, /*spill_dir=*/"",
              "", "") {
    request_.resident_bytes = weights_bytes_ + model.other_bytes;
    request_.time_ratio = 1.0;  // nothing is run to find it out
    request_.window_samples = settings_.window_samples();
    samples_ = share_of(request_.window_samples, 0, settings_.num_ranks).end;
    check_split(chain_, arguments.fixed_micro_batch(), request_.window_samples,
                settings_.num_ranks);
  }

  Estimate run() {
    Estimate result;
    result.model =
        arguments_.model_name_or_path.empty() ? arguments_.model : arguments_.model_name_or_path;
    result.optim = arguments_.optim;
    result.num_parameters = chain_.num_parameters();
    result.global_batch = request_.window_samples;
    result.num_ranks = settings_.num_ranks;
    result.weights_bytes = weights_bytes_;
    result.bytes_are_measured = is_measured_;
    result.gradients_bytes = bytes_of(chain_.parameters());
    for (const std::string& name : optimizer_names())
      result.state_bytes.emplace_back(name, settings_.optimizer_bytes(chain_, name));
    const std::int64_t fixed = arguments_.fixed_micro_batch();
    const std::int64_t size = fixed > 0 ? std::min(fixed, samples_) : samples_;
    for (const char* policy : {"none", "every", "sqrt"})
      result.policies.push_back(fixed_policy(size, policy));
    result.policies.push_back(leanest(size));
    result.input_bytes = input_bytes_;
    result.floor = find_floor_strategy();
    if (pages()) add_paged_floor(result);
    result.budget_bytes = arguments_.memory_budget_bytes;
    if (result.budget_bytes > 0) result.strategies = strategies_that_fit();
    return result;
  }

 private:
  EstimatedStrategy describe(const RunPlan& plan, const char* name, const std::string& policy) {
    input_bytes_ = plan.bytes_by_owner.at("inputs");
    return {name,
            policy,
            plan.micro_batch(),
            plan.num_micro_batches(),
            plan.batch.largest().schedule.peak_bytes,
            plan.predicted_peak_bytes()};
  }

  EstimatedStrategy fixed_policy(std::int64_t micro_batch, const std::string& policy) {
    const std::int64_t steps = (samples_ + micro_batch - 1) / micro_batch;
    RunPlanRequest request = request_;
    request.fixed_micro_batch =
        (samples_ + steps - 1) / steps;  // the trainer shares the samples evenly
    request.policy = policy;
    const char* name = policy != "none"         ? "checkpointing"
                       : micro_batch < samples_ ? "accumulation"
                                                : "plain";
    return describe(plan_run(request, settings_, chain_, book_), name, policy);
  }

  // The plan at the smallest budget that any plan fits.
  EstimatedStrategy leanest(std::int64_t micro_batch) {
    RunPlanRequest request = request_;
    request.fixed_micro_batch = micro_batch;
    request.may_update_in_backward = false;
    request.budget_bytes = smallest_budget(request, settings_, chain_, book_);
    return describe(plan_run(request, settings_, chain_, book_), "plan", "optimal");
  }

  // The fewest samples at a time hold the least; all of them at once need no gradients before
  // backward, which may be less still.
  EstimatedStrategy find_floor_strategy() {
    EstimatedStrategy few = leanest(book_.measure_smallest()), all = leanest(samples_);
    return all.peak_bytes <= few.peak_bytes ? all : few;
  }

  std::vector<EstimatedStrategy> strategies_that_fit() {
    const std::int64_t budget = arguments_.memory_budget_bytes;
    std::vector<EstimatedStrategy> strategies;
    const auto add_if_it_fits = [&](const EstimatedStrategy& strategy) {
      if (strategy.peak_bytes <= budget) strategies.push_back(strategy);
      return strategy.peak_bytes <= budget;
    };
    if (!add_if_it_fits(fixed_policy(samples_, "none"))) add_accumulation(budget, strategies);
    for (const char* policy : {"every", "sqrt"}) add_if_it_fits(fixed_policy(samples_, policy));
    RunPlanRequest request = request_;
    request.budget_bytes = budget;
    try {
      strategies.push_back(
          describe(plan_run(request, settings_, chain_, book_), "plan", "optimal"));
      return strategies;
    } catch (const BudgetError&) {
      // The floor says what would fit.
    }
    if (const std::optional<PagedPlan> found = pages() ? paged_plan(budget) : std::nullopt)
      strategies.push_back(describe(*found));
    return strategies;
  }

  bool pages() const { return !arguments_.spill_dir.empty() && settings_.num_ranks == 1; }

  std::optional<PagedPlan> paged_plan(std::int64_t budget) {
    StaticPager units(chain_, "", settings_.state_bytes_of_parameter(),
                      has_independent_elements(settings_.optimizer.name));
    RunPlanRequest request = request_;
    request.budget_bytes = budget;
    request.fixed_micro_batch = std::min(arguments_.fixed_micro_batch(), samples_);
    request.pager = &units;
    return count_paged_plan(request, settings_, chain_, book_);
  }

  static EstimatedStrategy describe(const PagedPlan& plan) {
    return {"paged plan",
            "optimal",
            plan.batch.largest().size,
            plan.batch.accumulation_steps,
            plan.batch.largest().schedule.peak_bytes,
            plan.batch.peak_bytes};
  }

  void add_paged_floor(Estimate& result) {
    const std::optional<PagedPlan> found = paged_plan(0);
    if (!found) return;
    result.paged_floor = describe(*found);
    result.paged_bytes_read = found->paging.bytes_read;
    result.paged_bytes_written = found->paging.bytes_written;
  }

  // The largest micro-batch that fits with everything kept.
  void add_accumulation(std::int64_t budget, std::vector<EstimatedStrategy>& strategies) {
    std::int64_t fits = book_.measure_smallest() - 1, too_large = samples_;
    std::optional<EstimatedStrategy> best;
    while (too_large - fits > 1) {
      const std::int64_t middle = (fits + too_large) / 2;
      const EstimatedStrategy strategy = fixed_policy(middle, "none");
      if (strategy.peak_bytes <= budget) {
        fits = middle;
        best = strategy;
      } else {
        too_large = middle;
      }
    }
    if (best) strategies.push_back(*best);
  }

  const TrainingArguments arguments_;
  const RunSettings settings_;
  const Chain& chain_;
  std::int64_t weights_bytes_;
  bool is_measured_;
  ProfileBook book_;
  RunPlanRequest request_;
  std::int64_t samples_ = 0;  // of an update on one rank
  std::int64_t input_bytes_ = 0;
};

}  // namespace

std::int64_t Estimate::state_bytes_of(const std::string& name) const {
  for (const auto& [optimizer, bytes] : state_bytes) {
    if (optimizer == name) return bytes;
  }
  throw ConfigError("there is no optimizer '" + name + "'");
}

Estimate estimate(const TrainingArguments& arguments) {
  const std::int64_t live_before = ShapeMeter::instance().live_bytes();
  const ZooModel model = build_shapes(arguments);
  // Everything on the meta device that lives now is the model.
  const std::int64_t weights_bytes = ShapeMeter::instance().live_bytes() - live_before;
  const auto load = [&](std::int64_t size) { return shapes_of_samples(model.input, size); };
  return Estimator(arguments, {model.chain, weights_bytes, load}).run();
}

Estimate estimate(const TrainingArguments& arguments, const Chain& chain, const Dataset& data) {
  const std::vector<at::Tensor> tensors = tensors_of(chain);
  const std::int64_t weights_bytes = bytes_of(tensors);
  // A TorchScript module keeps the places of its source, from which its errors are explained.
  const std::int64_t other_bytes =
      std::max<std::int64_t>(0, MemoryMeter::instance().live_bytes() - weights_bytes);
  const MicroBatch sample = load_first(data, kNumCompared);
  if (can_be_counted(chain, sample, tensors)) {
    const MetaSwapScope without_memory(tensors);
    const auto load = [&](std::int64_t size) { return shapes_of_samples(sample, size); };
    return Estimator(arguments, {chain, weights_bytes, load, /*is_measured=*/false, other_bytes})
        .run();
  }
  const auto load = [&](std::int64_t size) { return load_first(data, size); };
  return Estimator(arguments, {chain, weights_bytes, load, /*is_measured=*/true, other_bytes})
      .run();
}

}  // namespace headroom
