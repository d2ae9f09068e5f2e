// Chains from C++ modules, by tracing.
#include <headroom/core/error.h>
#include <headroom/model/chain.h>
#include "model/script_costs.h"
#include "model/script_program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

namespace headroom {
namespace script {
namespace {

using torch::jit::Stack;

// A trace is of one shape of micro-batch, because C++ reads sizes as plain numbers.
std::string shape_key(const MicroBatch& micro) {
  std::string key;
  for (const at::Tensor& input : micro.inputs)
    key += fmt::format("{}[{}]", c10::toString(input.scalar_type()),
                       fmt::join(input.sizes().vec(), ","));
  return key;
}

class TracedProgram final : public Program {
 public:
  TracedProgram(std::shared_ptr<torch::nn::Module> module, Chain::Forward forward,
                Signature signature, Chain::Loss loss)
      : Program(std::move(signature), std::move(loss)),
        module_(std::move(module)),
        forward_(std::move(forward)) {}

  /// Traces the example, chooses the cuts, and returns the segments between them.
  const std::vector<Segment>& cut(const MicroBatch& example) {
    const CutGraph graph = trace_graph(example);
    const std::vector<const Cut*> cuts =
        choose_cuts(graph, std::optional<Stack>(signature().arguments(example)));
    for (const Cut* each : cuts) positions_.push_back(each->position);
    num_nodes_ = graph.nodes.size();
    return add_segments(example, graph, cuts);
  }

  Stack run_whole(const MicroBatch& micro) override {
    Stack outputs;
    for (const at::Tensor& output : forward_(micro.inputs, micro)) outputs.emplace_back(output);
    return outputs;
  }

  Stack evaluate(const MicroBatch& micro) override {
    std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> flags;
    for (const auto& each : module_->modules()) flags.emplace_back(each, each->is_training());
    module_->eval();
    Stack outputs = run_whole(micro);
    for (const auto& [each, training] : flags) each->train(training);
    return outputs;
  }

  const Segment& segment(std::size_t index, const MicroBatch& micro) override {
    const auto found = segments_.find(shape_key(micro));
    if (found != segments_.end()) return found->second[index];
    const CutGraph graph = trace_graph(micro);
    std::vector<const Cut*> cuts;
    for (const std::size_t position : positions_) {
      const auto cut = std::find_if(graph.cuts.begin(), graph.cuts.end(),
                                    [&](const Cut& each) { return each.position == position; });
      if (cut == graph.cuts.end() || graph.nodes.size() != num_nodes_) {
        throw ConfigError(fmt::format(
            "the module does other work for inputs {} than for the example: make a chain for each",
            shape_key(micro)));
      }
      cuts.push_back(&*cut);
    }
    return add_segments(micro, graph, cuts)[index];
  }

  std::string file_name() const override { return {}; }
  void save(const std::string& path) const override {
    throw ConfigError(fmt::format(
        "'{}' cannot be written: a module of C++ has no file of its own; save its parameters",
        path));
  }

 private:
  CutGraph trace_graph(const MicroBatch& micro) {
    std::vector<StateTensor> state;
    for (const auto& item : module_->named_parameters())
      state.push_back({item.key(), item.value(), true});
    for (const auto& item : module_->named_buffers()) {
      if (item.value().defined()) state.push_back({item.key(), item.value(), false});
    }
    const torch::NoGradGuard no_grad;  // nothing is kept: the trace shows what is computed
    return find_cuts(script::trace(
        [&](const Stack& inputs) {
          MicroBatch given = micro;
          for (std::size_t i = 0; i < inputs.size(); ++i) given.inputs[i] = inputs[i].toTensor();
          return run_whole(given);
        },
        signature().arguments(micro), std::move(state)));
  }

  const std::vector<Segment>& add_segments(const MicroBatch& micro, const CutGraph& graph,
                                           const std::vector<const Cut*>& cuts) {
    return segments_[shape_key(micro)] = segments_between(graph, cuts);
  }

  std::shared_ptr<torch::nn::Module> module_;
  Chain::Forward forward_;
  std::vector<std::size_t> positions_;
  std::size_t num_nodes_ = 0;
  std::map<std::string, std::vector<Segment>> segments_;  // by shapes
};

}  // namespace
}  // namespace script

Chain Chain::from_function(std::shared_ptr<torch::nn::Module> module, Forward forward,
                           const std::vector<at::Tensor>& example, Loss loss) {
  if (!module || module->parameters().empty())
    throw ConfigError("the module has no parameters: there is nothing to train");
  if (example.empty()) throw ConfigError("tracing a module needs at least one example input");
  module->train();
  script::Signature signature;
  for (std::size_t i = 0; i < example.size(); ++i)
    signature.given.push_back({fmt::format("input {}", i), c10::TensorType::get()});
  MicroBatch micro;
  micro.inputs = example;
  micro.num_samples = micro.num_items = example[0].size(0);
  auto program = std::make_shared<script::TracedProgram>(std::move(module), std::move(forward),
                                                         std::move(signature), std::move(loss));
  const std::vector<script::Segment>* segments = nullptr;
  script::run_on_data("the module", micro, [&] {
    segments = &program->cut(micro);
    return torch::jit::Stack();
  });
  return script::make_chain(program, *segments);
}

}  // namespace headroom
