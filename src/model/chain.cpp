#include <headroom/model/chain.h>

#include <headroom/core/error.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>
#include <utility>

namespace headroom {
namespace {

// What a module prints of itself, with the shapes of its parameters: equal texts mean equal work on
// equal inputs.
std::string describe(const torch::nn::Module& module) {
  std::ostringstream text;
  for (const auto& part : module.modules()) {
    part->pretty_print(text);
    text << ' ';
  }
  for (const auto& parameter : module.parameters()) text << ' ' << parameter.sizes();
  return text.str();
}

class FunctionStage final : public Stage {
 public:
  FunctionStage(std::string name, std::shared_ptr<torch::nn::Module> module, Chain::Forward forward,
                std::string kind, bool runs_without_memory)
      : Stage(std::move(name)),
        module_(std::move(module)),
        forward_(std::move(forward)),
        kind_(std::move(kind)),
        runs_without_memory_(runs_without_memory) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    return forward_(inputs, micro);
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  std::string kind() const override { return kind_; }
  bool runs_without_memory() const override { return runs_without_memory_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  Chain::Forward forward_;
  std::string kind_;
  bool runs_without_memory_;
};

template <typename Collect>
std::vector<std::pair<std::string, at::Tensor>> collect_once(
    const std::vector<std::shared_ptr<Stage>>& stages, Collect collect) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  std::unordered_set<const void*> seen;
  for (const auto& stage : stages) {
    if (!stage->module()) continue;
    for (const auto& item : collect(*stage->module())) {
      if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second)
        continue;
      all.emplace_back(stage->parameter_prefix() + item.key(), item.value());
    }
  }
  return all;
}

}  // namespace

Chain Chain::from_sequential(const std::shared_ptr<torch::nn::SequentialImpl>& sequential,
                             Loss loss, bool runs_without_memory) {
  Chain chain;
  const auto children = sequential->named_children();
  if (children.is_empty())
    throw ConfigError("a chain needs at least one stage, and this Sequential has no module");
  std::size_t index = 0;
  for (auto it = sequential->begin(); it != sequential->end(); ++it, ++index) {
    const bool is_last = index + 1 == children.size();
    const std::shared_ptr<torch::nn::Module> module = it->ptr();
    // AnyModule::forward is not const, so each stage holds its own handle to the shared module.
    auto any = std::make_shared<torch::nn::AnyModule>(*it);
    Forward forward = [any](const std::vector<at::Tensor>& inputs, const MicroBatch&) {
      return std::vector<at::Tensor>{any->forward(inputs.at(0))};
    };
    if (is_last) {
      forward = [body = std::move(forward), loss, module](const std::vector<at::Tensor>& inputs,
                                                          const MicroBatch& micro) {
        const std::vector<at::Tensor> outputs = body(inputs, micro);
        std::vector<at::Tensor> results{loss(outputs, micro)};
        if (!module->is_training()) {
          if (at::Tensor right = count_correct(outputs, micro); right.defined())
            results.insert(results.end(), {std::move(right), outputs.at(0).argmax(1)});
        }
        return results;
      };
    }
    chain.add(std::make_shared<FunctionStage>(children[index].key(), module, std::move(forward),
                                              is_last ? std::string() : describe(*module),
                                              runs_without_memory));
  }
  return chain;
}

Chain& Chain::add(std::shared_ptr<Stage> stage) {
  for (const auto& other : stages_) {
    if (other->name() == stage->name())
      throw ConfigError(
          fmt::format("two stages are named '{}'; names must be unique", stage->name()));
  }
  stages_.push_back(std::move(stage));
  return *this;
}

Chain& Chain::add(std::string name, std::shared_ptr<torch::nn::Module> module, Forward forward) {
  return add(std::make_shared<FunctionStage>(std::move(name), std::move(module), std::move(forward),
                                             std::string(), false));
}

std::vector<std::pair<std::string, at::Tensor>> Chain::named_parameters() const {
  auto all = collect_once(
      stages_, [](const torch::nn::Module& module) { return module.named_parameters(); });
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const auto& item) { return !item.second.requires_grad(); }),
            all.end());
  return all;
}

std::vector<at::Tensor> Chain::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& item : named_parameters()) tensors.push_back(item.second);
  return tensors;
}

std::vector<std::pair<std::string, at::Tensor>> Chain::named_buffers() const {
  return collect_once(stages_,
                      [](const torch::nn::Module& module) { return module.named_buffers(); });
}

std::vector<std::pair<std::string, at::Tensor>> Chain::named_tensors() const {
  auto all = collect_once(
      stages_, [](const torch::nn::Module& module) { return module.named_parameters(); });
  for (auto& buffer : named_buffers()) all.push_back(std::move(buffer));
  return all;
}

std::int64_t Chain::num_parameters() const {
  std::int64_t count = 0;
  for (const auto& item : named_parameters()) count += item.second.numel();
  return count;
}

bool Chain::runs_without_memory() const {
  return std::all_of(stages_.begin(), stages_.end(),
                     [](const auto& stage) { return stage->runs_without_memory(); });
}

bool Chain::couples_samples() const {
  return std::any_of(stages_.begin(), stages_.end(),
                     [](const auto& stage) { return stage->couples_samples(); });
}

void Chain::train(bool on) const {
  for (const auto& stage : stages_) {
    if (stage->module()) stage->module()->train(on);
  }
}

at::Tensor summed_cross_entropy(const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
  return torch::nn::functional::cross_entropy(
      outputs.at(0), micro.targets.at(0),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

at::Tensor count_correct(const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
  const at::Tensor& scores = outputs.at(0);  // (B, classes)
  const bool are_scores = scores.dim() == 2 && !micro.targets.empty() &&
                          micro.targets[0].dim() == 1 && !micro.targets[0].is_floating_point();
  if (!are_scores) return {};
  return scores.argmax(1).eq(micro.targets[0]).sum();
}

}  // namespace headroom
