// TorchScript models with adapters, as users have them.
#include <headroom/core/error.h>
#include <headroom/model/safetensors.h>
#include "core/input_file.h"
#include "model/adapted_model.h"
#include "model/adapter_folder.h"
#include "model/adapter_targets.h"
#include "model/model_format.h"
#include "model/published.h"
#include "model/script_adapters.h"
#include "model/script_folder.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <utility>

namespace headroom {
namespace {

using script::LayerAdapter;
using script::LinearLayer;

double scale_of(const LoraConfig& lora) { return lora.alpha / static_cast<double>(lora.r); }

LayerAdapter make_script_adapter(const LinearLayer& layer, std::int64_t r) {
  const at::TensorOptions like = layer.weight.options().requires_grad(false);
  LayerAdapter adapter{layer, make_adapter_down(r, layer.in(), like),
                       torch::zeros({layer.out(), r}, like)};
  adapter.down.requires_grad_(true);
  adapter.up.requires_grad_(true);
  return adapter;
}

void set_trained(const std::vector<at::Tensor>& parameters, bool is_trained) {
  for (const at::Tensor& parameter : parameters) parameter.requires_grad_(is_trained);
}

// While it lives, the parameters are trained or not as it says, and otherwise afterwards.
class TrainedScope {
 public:
  TrainedScope(const std::vector<at::Tensor>& parameters, bool is_trained)
      : parameters_(parameters), is_trained_(is_trained) {
    set_trained(parameters_, is_trained_);
  }
  ~TrainedScope() { set_trained(parameters_, !is_trained_); }
  TrainedScope(const TrainedScope&) = delete;
  TrainedScope& operator=(const TrainedScope&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  bool is_trained_;
};

AdapterTensors tensors_of(const std::vector<LayerAdapter>& adapters) {
  AdapterTensors tensors;
  for (const LayerAdapter& adapter : adapters)
    add_adapter_tensors(tensors, adapter.layer.name, adapter.down, adapter.up);
  return tensors;
}

// Saves the adapters alone, and the module where it has no folder of its own.
class ScriptAdapterFormat final : public ModelFormat, public AdapterOwner {
 public:
  ScriptAdapterFormat(AdapterConfig config, Chain base, std::vector<at::Tensor> frozen,
                      std::vector<LayerAdapter> adapters)
      : config_(std::move(config)),
        base_(std::move(base)),
        frozen_(std::move(frozen)),
        adapters_(std::move(adapters)) {}

  SavedModel save(const Chain& /*chain*/, const std::string& folder) const override {
    return save_adapters(config_, adapter_tensors(), folder, [&](const std::string& to) {
      // A file remembers what is trained, and the module by itself is trained as a whole.
      const TrainedScope trained(frozen_, true);
      (base_.format() ? base_.format() : script_format({}))->save(base_, to);
    });
  }

  AdapterTensors adapter_tensors() const override { return tensors_of(adapters_); }

  void merge_into(Chain& chain) const override {
    for (const LayerAdapter& adapter : adapters_) script::merge(adapter, scale_of(config_.lora));
    set_trained(frozen_, true);
    chain = base_;
  }

 private:
  AdapterConfig config_;
  Chain base_;                      // the model as it was cut before
  std::vector<at::Tensor> frozen_;  // because of the adapters
  std::vector<LayerAdapter> adapters_;
};

std::vector<std::string> names_of(const std::vector<LinearLayer>& layers) {
  std::vector<std::string> names;
  for (const LinearLayer& layer : layers) names.push_back(layer.name);
  return names;
}

}  // namespace

bool add_script_adapters(Chain& chain, const LoraConfig& lora, const std::string& base,
                         const MicroBatch& example) {
  const std::vector<LinearLayer> layers = script::linear_layers(chain);
  if (layers.empty()) return false;
  AdapterConfig config{lora, chain.named_buffers().empty() ? base : std::string(), false, ""};
  std::vector<std::string>& targets = config.lora.target_modules;
  if (targets.empty()) targets = {kAllLinear};
  std::vector<LayerAdapter> adapters;
  for (const std::size_t place : targeted_layers(names_of(layers), targets))
    adapters.push_back(make_script_adapter(layers[place], lora.r));
  // By all of their names: what "all-linear" means is not known without the graph.
  targets.clear();
  for (const LayerAdapter& adapter : adapters) targets.push_back(adapter.layer.name);
  config.fan_in_fan_out = adapters.front().layer.is_transposed;
  const std::vector<at::Tensor> frozen = chain.parameters();
  // Before the model is cut, because stages of equal work are told apart by what they train.
  set_trained(frozen, false);
  try {
    Chain adapted = script::with_adapters(chain, adapters, {scale_of(lora), lora.dropout}, example);
    adapted.set_format(std::make_shared<ScriptAdapterFormat>(std::move(config), chain, frozen,
                                                             std::move(adapters)));
    chain = std::move(adapted);
  } catch (...) {
    set_trained(frozen, true);
    throw;
  }
  return true;
}

void merge_script_adapters(const Chain& chain, const std::string& folder) {
  const LoraConfig lora = read_adapter_config(folder).lora;
  const std::string path = adapter_weights_file(folder);
  const SafetensorsReader saved(path);
  std::vector<LayerAdapter> adapters;
  for (const LinearLayer& layer : script::linear_layers(chain)) {
    const SafetensorsEntry* down = saved.find(adapter_tensor_name(layer.name, 'A'));
    if (down == nullptr) continue;
    if (down->shape.empty() || down->shape.front() != lora.r || lora.r < 1) {
      throw DataError(fmt::format("'{}': {} is not of rank {}, as {} says", shown_path(path),
                                  down->name, lora.r, kAdapterConfigFile));
    }
    const UninitializedScope the_file_gives_values;
    adapters.push_back(make_script_adapter(layer, lora.r));
  }
  load_safetensors(path, tensors_of(adapters));
  for (const LayerAdapter& adapter : adapters) script::merge(adapter, scale_of(lora));
}

}  // namespace headroom
