// Chains from TorchScript modules.
#include <headroom/core/error.h>
#include <headroom/model/chain.h>
#include "core/input_file.h"
#include "core/output_file.h"
#include "model/script_costs.h"
#include "model/script_program.h"

#include <caffe2/serialize/read_adapter_interface.h>
#include <fmt/format.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace headroom {
namespace script {
namespace {

using namespace torch::jit;

// The training flags of a module and of all modules inside.
class ModeScope {
 public:
  ModeScope(const Module& module, bool training) {
    for (const Module& each : module.modules()) flags_.emplace_back(each, each.is_training());
    // Sets the modules inside as well, and so only after all flags are known.
    flags_.front().first.train(training);
  }
  ~ModeScope() {
    // train() sets the modules inside as well; they come later in the list and get their own then.
    for (auto& [module, training] : flags_) module.train(training);
  }
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  std::vector<std::pair<Module, bool>> flags_;
};

// A forward that replaces an attribute puts another tensor in a buffer's place; afterwards the
// buffer is the tensor that it was, with the new value.
class SameBuffersScope {
 public:
  explicit SameBuffersScope(const Module& module) {
    for (const Module& each : module.modules()) {
      for (const auto& buffer : each.named_buffers(/*recurse=*/false))
        buffers_.push_back({each, buffer.name, buffer.value});
    }
  }
  ~SameBuffersScope() {
    for (Buffer& buffer : buffers_) {
      const at::Tensor now = buffer.module.attr(buffer.name).toTensor();
      if (now.is_same(buffer.tensor)) continue;
      buffer.tensor.data().copy_(now.detach());
      buffer.module.setattr(buffer.name, buffer.tensor);
    }
  }
  SameBuffersScope(const SameBuffersScope&) = delete;
  SameBuffersScope& operator=(const SameBuffersScope&) = delete;

 private:
  struct Buffer {
    Module module;
    std::string name;
    at::Tensor tensor;
  };
  std::vector<Buffer> buffers_;
};

class ScriptProgram final : public Program {
 public:
  ScriptProgram(Module module, Signature signature, FixedArguments fixed, Chain::Loss loss)
      : Program(std::move(signature), std::move(loss)),
        module_(std::move(module)),
        fixed_(std::move(fixed)),
        has_fused_layers_(has_fused_layers(module_)) {}

  Stack run_whole(const MicroBatch& micro) override {
    // The optimizing executor changes bits.
    const GraphOptimizerEnabledGuard plain(false);
    const OperatorExceptionsScope exceptions;
    const SameBuffersScope buffers(module_);
    Stack arguments = signature().arguments(micro);
    for (IValue& argument : arguments) {
      if (argument.isTensor()) argument = argument.toTensor().clone();  // forward may write to it
    }
    for (const auto& [index, value] : fixed_) arguments.push_back(value);
    return run_on_data("the model", micro, [&] { return Stack{module_.forward(arguments)}; });
  }

  Stack evaluate(const MicroBatch& micro) override {
    const ModeScope mode(module_, false);
    return run_whole(micro);
  }
  bool evaluates_in_fp32() const override { return has_fused_layers_; }

  const Segment& segment(std::size_t index, const MicroBatch& /*micro*/) override {
    return segments_[index];
  }

  std::optional<FlatGraph> flat_graph(bool is_training) override {
    if (is_training) return flatten(module_, fixed_);
    const ModeScope mode(module_, false);
    return flatten(module_, fixed_);
  }

  std::string file_name() const override { return "model.pt"; }
  void save(const std::string& path) const override {
    OutputFile file(path, throw_as<DataError>);
    ExportModule(module_, [&](const void* data, std::size_t num_bytes) {
      file.write(data, num_bytes);
      return num_bytes;
    });
    file.commit();
  }

  std::vector<Segment> segments_;

 private:
  Module module_;
  FixedArguments fixed_;
  bool has_fused_layers_;
};

bool accepts_tensor(const c10::TypePtr& type) { return c10::TensorType::get()->isSubtypeOf(*type); }

// Which arguments the micro-batch gives, and what the others are.
std::pair<Signature, FixedArguments> signature_of(const Module& module, bool takes_targets,
                                                  const MicroBatch& example) {
  Signature signature;
  FixedArguments fixed;
  signature.takes_targets = takes_targets;
  const std::size_t num_tensors =
      example.inputs.size() + (takes_targets ? example.targets.size() : 0);
  const auto& arguments = module.get_method("forward").function().getSchema().arguments();
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const c10::Argument& argument = arguments[i];
    const bool is_given = i - 1 < num_tensors && accepts_tensor(argument.type());
    if (argument.default_value() && !is_given) {
      fixed[i - 1] = *argument.default_value();
    } else if (!fixed.empty()) {
      throw ConfigError(fmt::format(
          "the model's forward takes '{}' after '{}', which has a default: put it before that one",
          argument.name(), arguments[i - 1].name()));
    } else {
      signature.given.push_back({argument.name(), argument.type()});
    }
  }
  if (signature.given.empty())
    throw ConfigError("the model's forward takes no argument that data could be given for");
  return {signature, fixed};
}

// A trace has its mode baked in. A scripted module reads it.
void check_mode(const FlatGraph& flat) {
  int num_training = 0;
  int num_evaluating = 0;
  for (const Node* node : flat.graph->nodes()) {
    const std::string_view kind = node->kind().toQualString();
    const bool is_dropout = kind == "aten::dropout" || kind == "aten::feature_dropout" ||
                            kind == "aten::dropout_" || kind == "aten::alpha_dropout";
    if (!is_dropout && kind != "aten::batch_norm") continue;
    const auto training = toIValue(node->inputs()[is_dropout ? 2 : 5]);
    if (!training || !training->isBool()) continue;
    ++(training->toBool() ? num_training : num_evaluating);
  }
  if (num_training == 0 && num_evaluating > 0) {
    throw ConfigError(
        fmt::format("the model was saved for evaluation ({} dropouts or batch norms are switched "
                    "off): call model.train() before torch.jit.trace, or use torch.jit.script",
                    num_evaluating));
  }
}

void check_parameters(const Module& module) {
  std::int64_t num_parameters = 0;
  for (const auto& parameter : module.named_parameters())
    num_parameters += parameter.value.requires_grad() ? parameter.value.numel() : 0;
  if (num_parameters == 0) {
    throw ConfigError(
        "the model has no parameter that requires a gradient: it was frozen (torch.jit.freeze, "
        "torch.jit.optimize_for_inference); save it as torch.jit.script gives it");
  }
}

// A few samples are enough to see where bytes are.
MicroBatch first_samples(const MicroBatch& micro, std::int64_t num_samples) {
  MicroBatch first = micro;
  for (auto* tensors : {&first.inputs, &first.targets}) {
    for (at::Tensor& tensor : *tensors) {
      if (tensor.dim() > 0 && tensor.size(0) > num_samples)
        tensor = tensor.narrow(0, 0, num_samples);
    }
  }
  first.num_samples = std::min(micro.num_samples, num_samples);
  return first;
}

Chain cut_script(Module module, Chain::Loss loss, bool takes_targets, const MicroBatch& example) {
  return cut_module(std::move(module), std::move(loss), takes_targets, example, cuts_by(example));
}

// Lets LibTorch read a file that is opened as all others are.
class ScriptFile final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit ScriptFile(const std::string& path) : file_(path) {}
  std::size_t size() const override { return static_cast<std::size_t>(file_.size()); }
  std::size_t read(std::uint64_t offset, void* to, std::size_t num_bytes,
                   const char* /*what*/) const override {
    if (offset >= size()) return 0;
    num_bytes = std::min<std::size_t>(num_bytes, size() - offset);
    file_.read_at(static_cast<std::int64_t>(offset), to, static_cast<std::int64_t>(num_bytes));
    return num_bytes;
  }

 private:
  InputFile file_;
};

Module load_script(const std::string& path) {
  const auto file = std::make_shared<ScriptFile>(path);
  try {
    return torch::jit::load(file);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    throw DataError(
        fmt::format("'{}' is no whole TorchScript file (write it with "
                    "torch.jit.script(model).save(path); torch.save writes another format): {}",
                    shown_path(path), first_line(error)));
  }
}

// One number is the mean over the items, as criteria give it; several are one for each.
at::Tensor models_own_loss(const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
  const at::Tensor& loss = outputs.at(0);
  return loss.numel() == 1 ? loss.reshape({}) * static_cast<double>(micro.num_items) : loss.sum();
}

Chain::Loss loss_of_kind(LossKind kind) {
  return kind == LossKind::kModel ? Chain::Loss(models_own_loss) : make_loss(kind);
}

}  // namespace

std::optional<Stack> example_arguments(const Signature& signature, const MicroBatch& example) {
  constexpr std::int64_t kNumExampleSamples = 2;  // batch norms refuse one value per channel
  if (example.inputs.empty()) return std::nullopt;
  return signature.arguments(first_samples(example, kNumExampleSamples));
}

ChooseCuts cuts_by(const MicroBatch& example) {
  return [example](const CutGraph& graph, const Signature& signature) {
    return choose_cuts(graph, example_arguments(signature, example));
  };
}

Chain cut_module(Module module, Chain::Loss loss, bool takes_targets, const MicroBatch& example,
                 const ChooseCuts& choose) {
  if (!module.find_method("forward"))
    throw ConfigError("the model has no forward: script a module, not a function or a class");
  check_parameters(module);
  if (!module.is_training()) module.train();
  auto [signature, fixed] = signature_of(module, takes_targets, example);
  const CutGraph graph = find_cuts(flatten(module, fixed));
  check_mode(graph.flat);
  std::vector<const Cut*> cuts;
  run_on_data("the model", example, [&, &signature = signature] {
    cuts = choose(graph, signature);
    return Stack();
  });
  auto program = std::make_shared<ScriptProgram>(module, signature, fixed, std::move(loss));
  program->segments_ = segments_between(graph, cuts, example_arguments(signature, example));
  return make_chain(program, program->segments_);
}

}  // namespace script

Chain Chain::from_script(const torch::jit::Module& module, LossKind loss,
                         const MicroBatch& example) {
  return script::cut_script(module, script::loss_of_kind(loss), loss == LossKind::kModel, example);
}

Chain Chain::from_script(const torch::jit::Module& module, Loss loss, const MicroBatch& example) {
  return script::cut_script(module, std::move(loss), false, example);
}

Chain Chain::from_script(const std::string& path, LossKind loss, const MicroBatch& example) {
  return from_script(script::load_script(path), loss, example);
}

Chain Chain::from_script(const std::string& path, Loss loss, const MicroBatch& example) {
  return from_script(script::load_script(path), std::move(loss), example);
}

}  // namespace headroom
