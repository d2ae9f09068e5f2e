#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/schedule.h>
#include "core/hash.h"

#include "execute/recompute_state.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace headroom {
namespace {

std::string digest(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor plain = tensor.detach().contiguous().cpu();
  Sha256 hash;
  hash.update(plain.data_ptr(), plain.nbytes());
  return hash.hex_digest();
}

// What a step leaves behind, as digests, so that two steps need no more memory than one.
struct Outcome {
  std::string loss;
  std::vector<std::string> gradients;
  std::vector<std::string> buffers;
  std::string random;
};

class WholeModelCheck {
 public:
  WholeModelCheck(const Chain& chain, const MicroBatch& micro)
      : chain_(chain),
        micro_(micro),
        parameters_(chain.named_parameters()),
        buffers_(chain.named_buffers()) {}

  void run() {
    const Outcome whole = outcome([&] { return run_whole(); });
    const auto compare_run = [&](const std::string& policy, int option, const char* how) {
      compare(whole, outcome([&] { return run_chain(policy, option); }), how);
    };
    compare_run("none", 0, "kept");
    compare_run("every", 0, "recomputed");
    std::size_t num_options = 1;
    for (std::size_t i = 0; i < chain_.size(); ++i)
      num_options = std::max(num_options, chain_.stage(i).options().size());
    for (std::size_t option = 1; option < num_options; ++option)
      compare_run("none", static_cast<int>(option), "recomputed in part");
  }

 private:
  // Runs one step from the state in which the check began, and puts that state back.
  Outcome outcome(const std::function<std::string()>& step) {
    std::vector<std::unique_ptr<RecomputeScope>> as_before;
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      Stage& stage = chain_.stage(i);
      as_before.push_back(std::make_unique<RecomputeScope>(stage, StageState::record(stage)));
    }
    clear_gradients();
    Outcome result;
    try {
      result.loss = step();
    } catch (...) {
      clear_gradients();
      throw;
    }
    for (const auto& [name, parameter] : parameters_)
      result.gradients.push_back(digest(parameter.grad()));
    for (const auto& [name, buffer] : buffers_) result.buffers.push_back(digest(buffer));
    result.random = digest(cpu_random_state());
    clear_gradients();
    return result;
  }

  std::string run_whole() {
    const torch::AutoGradMode with_grad(true);
    const OwnerScope owner(Owner::kActivations);
    const at::Tensor loss = chain_.whole()->loss(micro_);
    if (loss.numel() != 1) {
      throw ConfigError(fmt::format("the loss of the model must be one number; it has {} elements",
                                    loss.numel()));
    }
    if (!loss.requires_grad()) {
      throw ConfigError(
          "the loss does not depend on the model's parameters through operations that have "
          "gradients: look for torch.no_grad, detach, or integer outputs in its forward");
    }
    try {
      loss.backward();
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error& error) {
      throw ConfigError(fmt::format("the model cannot be trained, because its backward fails: {}",
                                    error.what_without_backtrace()));
    }
    return digest(torch::tensor(loss.item<double>(), torch::kDouble));
  }

  // Stages that have fewer options take their last one.
  std::string run_chain(const std::string& policy, int option) {
    ChainCosts costs;
    costs.stages.resize(chain_.size());
    for (StageCosts& stage : costs.stages) stage.options.resize(1);
    std::vector<Operation> operations = schedule_of_policy(costs, parse_policy(policy)).operations;
    for (Operation& operation : operations) {
      const Stage& stage = chain_.stage(static_cast<std::size_t>(operation.stage));
      operation.option = std::min(option, static_cast<int>(stage.options().size()) - 1);
    }
    const MicroResult result = Executor(chain_).accumulate(micro_, operations, 1.0);
    return digest(torch::tensor(result.loss_sum, torch::kDouble));
  }

  void compare(const Outcome& whole, const Outcome& cut, const char* how) const {
    constexpr const char* kRemedy =
        "it cannot be trained as a chain (an operation depends on something that the graph does "
        "not show: a custom autograd function, a guard of C++, a random generator of its own)";
    const auto refuse = [&](const std::string& what) {
      throw ConfigError(
          fmt::format("the model cut into {} stages, {}, gives another {} than the whole model: {}",
                      chain_.size(), how, what, kRemedy));
    };
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (whole.gradients[i] != cut.gradients[i])
        refuse(fmt::format("gradient of '{}'", parameters_[i].first));
    }
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      if (whole.buffers[i] != cut.buffers[i]) refuse(fmt::format("buffer '{}'", buffers_[i].first));
    }
    if (whole.loss != cut.loss) refuse("loss");
    if (whole.random != cut.random) refuse("state of the random generator");
  }

  void clear_gradients() {
    for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
  }

  const Chain& chain_;
  const MicroBatch& micro_;
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
};

}  // namespace

void check_whole_model(const Chain& chain, const MicroBatch& micro) {
  if (chain.whole()) WholeModelCheck(chain, micro).run();
}

}  // namespace headroom
