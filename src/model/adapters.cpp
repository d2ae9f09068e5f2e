#include <headroom/model/adapters.h>

#include <headroom/core/error.h>
#include <headroom/model/safetensors.h>
#include "model/adaptable.h"
#include "model/adapted_model.h"
#include "model/adapter_folder.h"
#include "model/adapter_targets.h"
#include "model/published_parts.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

namespace headroom {
namespace {

// A linear layer that can have an adapter: rows of a weight of ours, by their name.
struct Layer {
  std::string theirs;  // "transformer.h.0.attn.c_attn"
  std::string ours;    // in the stage's module: "attn.c_attn"
  bool is_transposed = false;
  std::int64_t first_row = 0, num_rows = 0;
  AdaptableStage* stage = nullptr;
  std::shared_ptr<torch::nn::Module> module;  // of the stage
  AdaptableStage::Layer linear;
};

struct Adapter {
  Layer layer;
  LowRank tensors;
};

std::vector<Layer> layers_of(const Chain& chain) {
  const PublishedForm* form = find_published_form(chain);
  std::vector<Layer> layers;
  for (std::size_t i = 0; form != nullptr && i < chain.size(); ++i) {
    Stage& stage = chain.stage(i);
    auto* adaptable = dynamic_cast<AdaptableStage*>(&stage);
    if (adaptable == nullptr) continue;
    std::map<const void*, std::string> names;
    for (const auto& item : stage.module()->named_parameters())
      names[item.value().unsafeGetTensorImpl()] = item.key();
    for (const AdaptableStage::Layer& linear : adaptable->adaptable_layers()) {
      const std::string& name = names.at(linear.weight.unsafeGetTensorImpl());
      for (const PublishedPart& part :
           published_parts(*form, stage.parameter_prefix() + name, linear.weight.size(0))) {
        layers.push_back({layer_name(part.name), layer_name(name), part.is_transposed,
                          part.first_row, part.num_rows, adaptable, stage.module(), linear});
      }
    }
  }
  if (layers.empty()) {
    throw ConfigError(
        "adapters are for linear layers of transformer blocks of the zoo and of TorchScript "
        "models, "
        "and this model has none");
  }
  return layers;
}

// What PEFT adapts where nothing is said: queries and values, or the layer that makes them.
std::vector<std::string> usual_targets(const std::vector<Layer>& layers) {
  std::vector<std::string> targets;
  for (const char* name : {"c_attn", "query", "value", "q_proj", "v_proj"}) {
    if (std::any_of(layers.begin(), layers.end(),
                    [&](const Layer& layer) { return last_word(layer.theirs) == name; }))
      targets.emplace_back(name);
  }
  return targets;
}

// Of the module that holds a stage's adapters, which is made where it is missing.
torch::nn::Module& adapter_module(torch::nn::Module& stage_module) {
  const auto children = stage_module.named_children();
  if (children.contains(kAdapterModule)) return *children[kAdapterModule];
  return *stage_module.register_module(kAdapterModule, std::make_shared<torch::nn::Module>());
}

Adapter make_adapter(const Layer& layer, std::int64_t r) {
  std::string name = layer.ours;
  if (layer.num_rows < layer.linear.weight.size(0)) name += "_" + last_word(layer.theirs);
  std::replace(name.begin(), name.end(), '.', '_');
  torch::nn::Module& owner = adapter_module(*layer.module);
  Adapter adapter{layer, {}};
  adapter.tensors.down =
      owner.register_parameter(name + "_A", make_adapter_down(r, layer.linear.weight.size(1), {}));
  adapter.tensors.up = owner.register_parameter(name + "_B", torch::zeros({layer.num_rows, r}));
  adapter.tensors.first_row = layer.first_row;
  return adapter;
}

// Saves the adapters alone, and the base where it has no folder of its own.
class AdapterFormat final : public DerivedFormat, public AdapterOwner {
 public:
  AdapterFormat(PublishedForm base_form, AdapterConfig adapter_config)
      : DerivedFormat(std::move(base_form)), config(std::move(adapter_config)) {}

  std::shared_ptr<const DerivedFormat> with_form(PublishedForm form) const override {
    const auto format = std::make_shared<AdapterFormat>(std::move(form), config);
    format->adapters = adapters;
    format->frozen = frozen;
    return format;
  }

  SavedModel save(const Chain& chain, const std::string& folder) const override {
    return save_adapters(config, adapter_tensors(), folder,
                         [&](const std::string& to) { base().save(chain, to); });
  }

  AdapterTensors adapter_tensors() const override {
    AdapterTensors tensors;
    for (const Adapter& adapter : adapters)
      add_adapter_tensors(tensors, adapter.layer.theirs, adapter.tensors.down, adapter.tensors.up);
    return tensors;
  }

  void merge_into(Chain& chain) const override;

  const AdapterConfig config;
  std::vector<Adapter> adapters;
  std::vector<at::Tensor> frozen;  // because of them
};

bool continues_text(const PublishedForm& form) {
  return form.config.find("LMHeadModel") != std::string::npos ||
         form.config.find("ForCausalLM") != std::string::npos;
}

void AdapterFormat::merge_into(Chain& chain) const {
  const torch::NoGradGuard no_grad;
  for (const Adapter& adapter : adapters) {
    const auto& [layer, tensors] = adapter;
    layer.linear.weight.narrow(0, layer.first_row, layer.num_rows)
        .addmm_(tensors.up, tensors.down, 1.0, layer.stage->adapter_scale());
    layer.linear.adapters->clear();
    if (layer.module->named_children().contains(kAdapterModule))
      layer.module->unregister_module(kAdapterModule);
  }
  for (const at::Tensor& parameter : frozen) parameter.requires_grad_(true);
  set_published_form(chain, PublishedForm(base().form()));
}

}  // namespace

void add_adapters(Chain& chain, const LoraConfig& lora, const std::string& base,
                  const MicroBatch& example) {
  if (lora.r < 1) throw ConfigError(fmt::format("adapters of rank {}: give 1 or more", lora.r));
  if (adapters_of(chain) != nullptr) throw ConfigError("the model has adapters already");
  if (add_script_adapters(chain, lora, base, example)) return;
  const std::vector<Layer> layers = layers_of(chain);
  AdapterConfig config{lora, base, false, ""};
  if (config.lora.target_modules.empty()) config.lora.target_modules = usual_targets(layers);
  std::vector<std::string> names;
  for (const Layer& layer : layers) names.push_back(layer.theirs);
  std::vector<Layer> chosen;
  for (const std::size_t place : targeted_layers(names, config.lora.target_modules))
    chosen.push_back(layers[place]);
  if (continues_text(published_form(chain))) config.task_type = "CAUSAL_LM";
  config.fan_in_fan_out = chosen.front().is_transposed;
  const auto format = std::make_shared<AdapterFormat>(published_form(chain), config);
  for (auto& [name, parameter] : chain.named_parameters()) {
    parameter.requires_grad_(false);
    format->frozen.push_back(parameter);
  }
  for (const Layer& layer : chosen) {
    format->adapters.push_back(make_adapter(layer, lora.r));
    layer.linear.adapters->push_back(format->adapters.back().tensors);
    layer.stage->set_adapter_factors(lora.alpha / static_cast<double>(lora.r), lora.dropout);
  }
  chain.set_format(format);
}

void train_head(const Chain& chain) {
  const PublishedForm& form = published_form(chain);
  for (auto& [ours, tensor] : chain.named_tensors()) {
    for (const std::string& theirs : published_names(form, ours)) {
      const bool is_head =
          std::any_of(form.head.begin(), form.head.end(),
                      [&](const std::string& start) { return starts_with(theirs, start); });
      if (is_head && tensor.is_floating_point()) at::Tensor(tensor).requires_grad_(true);
    }
  }
}

void merge_adapters(Chain& chain) {
  const auto format = chain.format();  // which merging replaces
  if (const AdapterOwner* adapters = adapters_of(chain)) adapters->merge_into(chain);
}

void load_and_merge_adapters(Chain& chain, const std::string& folder) {
  {
    const UninitializedScope the_file_gives_values;
    add_adapters(chain, read_adapter_config(folder).lora, base_of_adapters(folder));
  }
  load_safetensors(adapter_weights_file(folder), adapters_of(chain)->adapter_tensors());
  merge_adapters(chain);
}

}  // namespace headroom
