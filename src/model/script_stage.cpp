// The stages of a chain that was cut from a graph.
#include "core/torch_compat.h"
#include "model/script_program.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <optional>
#include <set>
#include <utility>

namespace headroom::script {
namespace {

// The module that holds what `name` ends in, made on the way down from `root`: "a.b.weight" is
// `weight` of the child `b` of the child `a`.
std::pair<std::shared_ptr<torch::nn::Module>, std::string> place_of(
    std::shared_ptr<torch::nn::Module> module, const std::string& name) {
  std::size_t begin = 0;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', begin)) {
    const std::string part = name.substr(begin, dot - begin);
    const auto children = module->named_children();
    std::shared_ptr<torch::nn::Module> child;
    if (const auto* found = children.find(part)) {
      child = *found;
    } else {
      child = module->register_module(part, std::make_shared<torch::nn::Module>(part));
    }
    module = child;
    begin = dot + 1;
  }
  return {module, name.substr(begin)};
}

std::shared_ptr<torch::nn::Module> module_of(const std::vector<StateTensor>& state) {
  auto root = std::make_shared<torch::nn::Module>("Script");
  for (const StateTensor& each : state) {
    const auto [module, name] = place_of(root, each.name);
    if (each.is_parameter)
      module->register_parameter(name, each.tensor, each.tensor.requires_grad());
    else
      module->register_buffer(name, each.tensor);
  }
  return root;
}

// The interpreter casts by itself where autocast is on, so that it is switched off and not passed
// by.
class NoAutocastScope {
 public:
  NoAutocastScope() : before_(HEADROOM_AUTOCAST_CPU_ENABLED()) {
    HEADROOM_AUTOCAST_SET_CPU_ENABLED(false);
  }
  ~NoAutocastScope() { HEADROOM_AUTOCAST_SET_CPU_ENABLED(before_); }
  NoAutocastScope(const NoAutocastScope&) = delete;
  NoAutocastScope& operator=(const NoAutocastScope&) = delete;

 private:
  bool before_;
};

class ScriptStage final : public Stage {
 public:
  ScriptStage(std::string name, std::shared_ptr<Program> program, std::size_t index, bool is_last,
              const Segment& segment)
      : Stage(std::move(name)),
        program_(std::move(program)),
        index_(index),
        is_last_(is_last),
        module_(module_of(segment.state())),
        kind_(is_last ? std::string() : segment.kind()),
        options_(segment.options()),
        depends_on_buffers_(segment.depends_on_buffers()) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int option) override {
    if (!module_->is_training()) return evaluate(micro);
    const Segment& segment = program_->segment(index_, micro);
    const torch::jit::Stack arguments = program_->signature().arguments(micro);
    // The first stage is given the arguments, which are no boundary.
    const std::vector<at::Tensor> none;
    const std::vector<at::Tensor>& boundary = index_ == 0 ? none : inputs;
    const std::string what = fmt::format("stage '{}' of the model", name());
    if (is_last_) {
      const torch::jit::Stack outputs =
          run_on_data(what, micro, [&] { return segment.run_last(boundary, arguments, option); });
      return program_->results(outputs, micro, true);
    }
    std::vector<at::Tensor> outputs;
    run_on_data(what, micro, [&] {
      outputs = segment.run(boundary, arguments, option);
      return torch::jit::Stack();
    });
    return outputs;
  }

  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  std::vector<std::string> options() const override { return options_; }
  std::string kind() const override { return kind_; }
  bool depends_on_buffers() const override { return depends_on_buffers_; }
  std::string parameter_prefix() const override { return {}; }

 private:
  // The segments are those of training. The last stage evaluates the model whole, which keeps no
  // more in memory than its stages would.
  std::vector<at::Tensor> evaluate(const MicroBatch& micro) const {
    if (!is_last_) return {micro.inputs.at(0)};
    std::optional<NoAutocastScope> no_autocast;
    if (program_->evaluates_in_fp32()) no_autocast.emplace();
    const torch::jit::Stack outputs =
        run_on_data("the model", micro, [&] { return program_->evaluate(micro); });
    return program_->results(outputs, micro, false);
  }

  std::shared_ptr<Program> program_;
  std::size_t index_;
  bool is_last_;
  std::shared_ptr<torch::nn::Module> module_;
  std::string kind_;
  std::vector<std::string> options_;
  bool depends_on_buffers_;
};

// A segment is named by the module of its first parameter, or by its first operation.
std::string name_of(const Segment& segment, std::set<std::string>& taken) {
  std::string name = "empty";
  if (!segment.state().empty()) {
    const std::string& first = segment.state().front().name;
    name = first.find('.') == std::string::npos ? first : first.substr(0, first.rfind('.'));
  } else if (segment.graph().nodes().begin() != segment.graph().nodes().end()) {
    for (const torch::jit::Node* node : segment.graph().nodes()) {
      name = node->kind().toUnqualString();
      if (node->kind().is_aten()) break;
    }
  }
  std::string unique = name;
  for (int i = 2; !taken.insert(unique).second; ++i) unique = fmt::format("{}#{}", name, i);
  return unique;
}

}  // namespace

Chain make_chain(const std::shared_ptr<Program>& program, const std::vector<Segment>& segments) {
  Chain chain;
  std::set<std::string> names;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    chain.add(std::make_shared<ScriptStage>(name_of(segments[i], names), program, i,
                                            i + 1 == segments.size(), segments[i]));
  }
  chain.set_whole(program);
  return chain;
}

}  // namespace headroom::script
