#include "execute/optimizer_in_backward.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include "core/autograd_node.h"

namespace headroom {

std::string why_not_in_backward(const UpdateDemands& demands) {
  if (demands.max_grad_norm > 0) {
    return fmt::format(
        "clipping to the global norm {} needs the gradients of all parameters before the first "
        "update; set --max_grad_norm 0 or "
        "step after backward",
        demands.max_grad_norm);
  }
  if (demands.dynamic_loss_scale) {
    return "dynamic loss scaling skips an update when any gradient overflows, which is known only "
           "after backward; use --bf16 instead of "
           "--fp16 or step after backward";
  }
  if (demands.num_ranks > 1) {
    return fmt::format(
        "the gradients of {} ranks are summed once per update, after backward; use one rank or "
        "step after backward",
        demands.num_ranks);
  }
  return {};
}

struct OptimizerInBackward::Watch {
  struct Entry {
    at::Tensor parameter;
    std::size_t group;
    NodePtr accumulator;  // a parameter holds it weakly only
    std::uintptr_t hook_key = 0;
    std::int64_t expected = 1;  // calls of backward per micro-batch
    std::int64_t remaining = 0;
  };

  explicit Watch(LeanOptimizer& watched) : optimizer(watched) {}

  /// The gradient of this parameter has arrived from one call of backward.
  void arrived(std::size_t index) {
    if (!armed) return;
    Entry& entry = entries[index];
    if (--entry.remaining < 0) {
      throw Error(ExitCode::kInternal,
                  fmt::format("a parameter of sizes [{}] got a gradient after it had been updated: "
                              "more than {} calls of backward reach it; "
                              "say so by expect_backwards()",
                              fmt::join(entry.parameter.sizes(), ", "), entry.expected));
    }
    if (entry.remaining == 0) update(entry);
  }

  void update(Entry& entry) {
    optimizer.step_parameter(entry.parameter, entry.group);
    entry.parameter.mutable_grad() = at::Tensor();
    ++num_updated;
  }

  LeanOptimizer& optimizer;
  std::vector<Entry> entries;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index_of;
  bool armed = false;
  std::int64_t num_updated = 0;
};

namespace {

/// Calls back after a parameter's gradient was added to.
class ArrivalHook : public torch::autograd::FunctionPostHook {
 public:
  explicit ArrivalHook(std::function<void()> arrived) : arrived_(std::move(arrived)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    arrived_();
    return outputs;
  }

 private:
  std::function<void()> arrived_;
};

}  // namespace

OptimizerInBackward::OptimizerInBackward(LeanOptimizer& optimizer)
    : watch_(std::make_unique<Watch>(optimizer)) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& parameter : groups[group].params()) {
      if (!parameter.requires_grad()) continue;
      const std::size_t index = watch_->entries.size();
      Watch::Entry entry{parameter, group, torch::autograd::impl::grad_accumulator(parameter)};
      entry.hook_key = entry.accumulator->add_post_hook(std::make_unique<ArrivalHook>(
          [watch = watch_.get(), index]() { watch->arrived(index); }));
      watch_->index_of[parameter.unsafeGetTensorImpl()] = index;
      watch_->entries.push_back(std::move(entry));
    }
  }
}

OptimizerInBackward::~OptimizerInBackward() {
  for (const auto& entry : watch_->entries) entry.accumulator->del_post_hook(entry.hook_key);
}

void OptimizerInBackward::expect_backwards(const at::Tensor& parameter,
                                           std::int64_t num_backwards) {
  const auto found = watch_->index_of.find(parameter.unsafeGetTensorImpl());
  if (found == watch_->index_of.end())
    throw ConfigError("expect_backwards: the optimizer does not update this parameter");
  if (num_backwards < 1)
    throw ConfigError(
        fmt::format("expect_backwards: {} calls of backward; it must be 1 or more", num_backwards));
  watch_->entries[found->second].expected = num_backwards;
}

void OptimizerInBackward::arm() {
  if (watch_->armed)
    throw Error(ExitCode::kInternal, "OptimizerInBackward::arm() was called twice in one window");
  {
    const OwnerScope scope(Owner::kOptimizer);
    watch_->optimizer.prepare_state();
  }
  for (auto& entry : watch_->entries) entry.remaining = entry.expected;
  watch_->num_updated = 0;
  watch_->armed = true;
}

std::int64_t OptimizerInBackward::finish() {
  if (!watch_->armed)
    throw Error(ExitCode::kInternal, "OptimizerInBackward::finish() was called without arm()");
  watch_->armed = false;
  for (auto& entry : watch_->entries) {
    if (entry.remaining > 0 && entry.parameter.grad().defined()) watch_->update(entry);
  }
  return watch_->num_updated;
}

void OptimizerInBackward::disarm() {
  watch_->armed = false;
  for (auto& entry : watch_->entries) entry.parameter.mutable_grad() = at::Tensor();
}

bool OptimizerInBackward::armed() const { return watch_->armed; }

}  // namespace headroom
