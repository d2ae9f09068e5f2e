#include "model/script_adapters.h"

#include <headroom/core/error.h>
#include "model/adapter_targets.h"
#include "model/script_program.h"

#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace headroom::script {
namespace {

using namespace torch::jit;

// A product of activations with a weight.
struct Product {
  Node* node;
  Value* activations;
  bool is_transposed;  // the weight is (in, out)
};

// What forward does with a weight, but for asking for its shape.
struct WeightUses {
  std::vector<Product> products;
  std::vector<Use> others;
};

bool is_one(const Value* value) {
  const auto constant = toIValue(value);
  return constant && constant->isScalar() && constant->toScalar().to<double>() == 1.0;
}

// The use as second factor of a plain product.
std::optional<Product> product_with(const Use& use, bool is_transposed) {
  Node* node = use.user;
  const auto inputs = node->inputs();
  if ((node->kind() == aten::matmul || node->kind() == aten::mm) && use.offset == 1)
    return Product{node, inputs[0], is_transposed};
  if (node->kind() == aten::addmm && use.offset == 2 && is_one(inputs[3]) && is_one(inputs[4]))
    return Product{node, inputs[1], is_transposed};
  return std::nullopt;
}

bool transposes_matrix(const Node* node) {
  if (node->kind() == aten::t || node->kind() == aten::numpy_T) return true;
  if (node->kind() != aten::transpose) return false;
  const auto first = toIValue(node->inputs()[1]), second = toIValue(node->inputs()[2]);
  return first && second && first->isInt() && second->isInt() &&
         (first->toInt() - second->toInt()) % 2 != 0;
}

// Those of the transposed weight, if it has no other uses.
std::optional<std::vector<Product>> products_of_transpose(const Node* transpose) {
  std::vector<Product> products;
  for (const Use& use : transpose->output()->uses()) {
    const auto product = product_with(use, false);
    if (!product) return std::nullopt;
    products.push_back(*product);
  }
  return products;
}

WeightUses uses_of(const Value* weight) {
  WeightUses found;
  for (const Use& use : weight->uses()) {
    if (reads_shape_only(use.user)) continue;
    if (use.user->kind() == aten::linear && use.offset == 1) {
      found.products.push_back({use.user, use.user->inputs()[0], false});
      continue;
    }
    if (const auto product = product_with(use, true)) {
      found.products.push_back(*product);
      continue;
    }
    const auto of_transpose = transposes_matrix(use.user) ? products_of_transpose(use.user)
                                                          : std::optional<std::vector<Product>>();
    if (of_transpose) {
      found.products.insert(found.products.end(), of_transpose->begin(), of_transpose->end());
    } else {
      found.others.push_back(use);
    }
  }
  return found;
}

// Uses in branches are let pass: PyTorch's attention has ways around its products, for evaluation.
bool is_linear_layer(const FlatGraph& flat, const WeightUses& uses) {
  const auto is_certain = [&](const Use& use) {
    return use.user->owningBlock() == flat.graph->block();
  };
  const auto is_like_first = [&](const Product& product) {
    return product.is_transposed == uses.products.front().is_transposed;
  };
  return !uses.products.empty() &&
         std::all_of(uses.products.begin(), uses.products.end(), is_like_first) &&
         std::none_of(uses.others.begin(), uses.others.end(), is_certain);
}

std::vector<LinearLayer> layers_in(const FlatGraph& flat) {
  std::vector<LinearLayer> layers;
  for (std::size_t i = 0; i < flat.state.size(); ++i) {
    const StateTensor& state = flat.state[i];
    if (!state.is_parameter || state.tensor.dim() != 2 || !state.tensor.is_floating_point())
      continue;
    const WeightUses uses = uses_of(flat.graph->inputs()[flat.num_arguments + i]);
    if (is_linear_layer(flat, uses))
      layers.push_back({layer_name(state.name), state.tensor, uses.products.front().is_transposed});
  }
  return layers;
}

// Puts adapters into a flat graph.
class AdapterInserter {
 public:
  AdapterInserter(FlatGraph& flat, const AdapterFactors& factors)
      : flat_(flat), graph_(*flat.graph), factors_(factors) {}

  // A weight that the graph does not read has no use for its adapter.
  void insert(const LayerAdapter& adapter) {
    const std::size_t num_state = flat_.state.size();
    for (std::size_t i = 0; i < num_state; ++i) {
      if (!flat_.state[i].tensor.is_same(adapter.layer.weight)) continue;
      Value* weight = graph_.inputs()[flat_.num_arguments + i];
      const WeightUses uses = uses_of(weight);
      Value* down = add_parameter(adapter.layer.name + ".lora_A.weight", adapter.down);
      Value* up = add_parameter(adapter.layer.name + ".lora_B.weight", adapter.up);
      for (const Product& product : uses.products) add_to(product, down, up);
      for (const Use& use : uses.others) read_merged(use, weight, down, up, adapter.layer);
      return;
    }
  }

 private:
  Value* add_parameter(const std::string& name, const at::Tensor& tensor) {
    for (const StateTensor& state : flat_.state) {
      if (state.name == name)
        throw ConfigError(
            fmt::format("the model has a tensor '{}' of its own, which an adapter's would be "
                        "called: leave that layer out of the target modules",
                        name));
    }
    Value* value = graph_.addInput();
    value->setType(c10::TensorType::get());
    flat_.state.push_back({name, tensor, true});
    return value;
  }

  // Multiplied by the scale where it is narrowest.
  void add_to(const Product& product, Value* down, Value* up) {
    const WithInsertPoint behind(product.node->next());
    Value* given = product.activations;
    if (factors_.dropout_p > 0)
      given = graph_.insert(aten::dropout, {given, factors_.dropout_p, true});
    Value* low = graph_.insert(aten::linear, {given, down});
    if (factors_.scale != 1.0) low = graph_.insert(aten::mul, {low, factors_.scale});
    Value* added = graph_.insert(aten::linear, {low, up});
    Value* result = product.node->output();
    Value* sum = graph_.insert(aten::add, {result, added});
    result->replaceAllUsesWith(sum);
    sum->node()->replaceInput(0, result);
  }

  // Whatever else is done with the weight is done with what the layer multiplies by in effect.
  void read_merged(const Use& use, Value* weight, Value* down, Value* up,
                   const LinearLayer& layer) {
    const WithInsertPoint before(use.user);
    Value* left = layer.is_transposed ? graph_.insert(aten::t, {down}) : up;
    Value* right = layer.is_transposed ? graph_.insert(aten::t, {up}) : down;
    Value* merged = graph_.insert(aten::addmm, {weight, left, right},
                                  {NamedValue("beta", 1.0), NamedValue("alpha", factors_.scale)});
    use.user->replaceInput(use.offset, merged);
  }

  FlatGraph& flat_;
  Graph& graph_;
  AdapterFactors factors_;
};

FlatGraph adapted(std::optional<FlatGraph> flat, const std::vector<LayerAdapter>& adapters,
                  const AdapterFactors& factors) {
  AdapterInserter inserter(*flat, factors);
  for (const LayerAdapter& adapter : adapters) inserter.insert(adapter);
  return std::move(*flat);
}

Segment in_one_piece(FlatGraph flat) {
  CutGraph whole;
  whole.flat = std::move(flat);
  for (Node* node : whole.flat.graph->nodes()) {
    if (node->kind() != prim::Constant) whole.nodes.push_back(node);
  }
  return Segment(whole, nullptr, nullptr);
}

// The module has no code with adapters: its graphs for training and evaluation, which are made of
// its code, are the model.
class AdaptedProgram final : public Program {
 public:
  AdaptedProgram(Chain base, const Program& program, const CutGraph& training,
                 const std::vector<const Cut*>& cuts, const MicroBatch& example,
                 FlatGraph evaluation)
      : Program(program.signature(), program.loss_function()),
        base_(std::move(base)),
        segments_(
            segments_between(training, cuts, example_arguments(program.signature(), example))),
        whole_(training, nullptr, nullptr),
        evaluation_(in_one_piece(std::move(evaluation))) {}

  Stack run_whole(const MicroBatch& micro) override { return run(whole_, micro); }
  Stack evaluate(const MicroBatch& micro) override { return run(evaluation_, micro); }
  bool evaluates_in_fp32() const override { return has_fused_layers(evaluation_.graph().block()); }
  const Segment& segment(std::size_t index, const MicroBatch& /*micro*/) override {
    return segments_[index];
  }
  const std::vector<Segment>& segments() const { return segments_; }

  std::string file_name() const override { return base_.whole()->file_name(); }
  void save(const std::string& path) const override { base_.whole()->save(path); }

 private:
  Stack run(const Segment& segment, const MicroBatch& micro) const {
    const Stack arguments = signature().arguments(micro);
    return run_on_data("the model", micro, [&] { return segment.run_last({}, arguments); });
  }

  Chain base_;
  std::vector<Segment> segments_;
  Segment whole_;
  Segment evaluation_;
};

}  // namespace

std::vector<LinearLayer> linear_layers(const Chain& chain) {
  auto* program = dynamic_cast<Program*>(chain.whole().get());
  if (program == nullptr) return {};
  const std::optional<FlatGraph> flat = program->flat_graph(/*is_training=*/true);
  return flat ? layers_in(*flat) : std::vector<LinearLayer>();
}

Chain with_adapters(const Chain& chain, const std::vector<LayerAdapter>& adapters,
                    const AdapterFactors& factors, const MicroBatch& example) {
  return cut_with_adapters(chain, adapters, factors, example, cuts_by(example));
}

Chain cut_with_adapters(const Chain& chain, const std::vector<LayerAdapter>& adapters,
                        const AdapterFactors& factors, const MicroBatch& example,
                        const ChooseCuts& choose) {
  auto& program = dynamic_cast<Program&>(*chain.whole());
  const CutGraph training = find_cuts(adapted(program.flat_graph(true), adapters, factors));
  std::vector<const Cut*> cuts;
  run_on_data("the model", example, [&] {
    cuts = choose(training, program.signature());
    return Stack();
  });
  const auto adapted_program = std::make_shared<AdaptedProgram>(
      chain, program, training, cuts, example,
      adapted(program.flat_graph(false), adapters, {factors.scale, 0.0}));
  return make_chain(adapted_program, adapted_program->segments());
}

void merge(const LayerAdapter& adapter, double scale) {
  const torch::NoGradGuard no_grad;
  const at::Tensor rows =
      adapter.layer.is_transposed ? adapter.layer.weight.t() : adapter.layer.weight;
  rows.addmm_(adapter.up, adapter.down, 1.0, scale);
}

}  // namespace headroom::script
