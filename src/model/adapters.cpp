#include <headroom/model/adapters.h>

#include <headroom/core/error.h>
#include <headroom/model/safetensors.h>
#include "core/hashed_file.h"
#include "core/input_file.h"
#include "core/nearest_name.h"
#include "core/output_file.h"
#include "core/text.h"
#include "model/adaptable.h"
#include "model/adapted_model.h"
#include "model/adapter_config.h"
#include "model/published_parts.h"
#include "model/safetensors_writer.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <utility>

namespace headroom {
namespace {

namespace fs = std::filesystem;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr const char* kAllLinear = "all-linear";

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

std::string without_weight(const std::string& name) {
  constexpr std::string_view kEnding = ".weight";
  return ends_with(name, kEnding) ? name.substr(0, name.size() - kEnding.size()) : name;
}

std::string last_word(const std::string& name) { return name.substr(name.rfind('.') + 1); }

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
        layers.push_back({without_weight(part.name), without_weight(name), part.is_transposed,
                          part.first_row, part.num_rows, adaptable, stage.module(), linear});
      }
    }
  }
  if (layers.empty()) {
    throw ConfigError(
        "adapters are for linear layers of transformer blocks of the zoo, and this model has none");
  }
  return layers;
}

bool is_target(const Layer& layer, const std::string& target) {
  return target == kAllLinear || layer.theirs == target || ends_with(layer.theirs, "." + target);
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

void check_target(const std::vector<Layer>& layers, const std::string& target) {
  std::vector<std::string> names = {kAllLinear};
  for (const Layer& layer : layers) {
    if (is_target(layer, target)) return;
    const std::string name = last_word(layer.theirs);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  throw ConfigError(unknown_name("linear layer", target, names));
}

// Of the module that holds a stage's adapters, which is made where it is missing.
torch::nn::Module& adapter_module(torch::nn::Module& stage_module) {
  const auto children = stage_module.named_children();
  if (children.contains(kAdapterModule)) return *children[kAdapterModule];
  return *stage_module.register_module(kAdapterModule, std::make_shared<torch::nn::Module>());
}

Adapter make_adapter(const Layer& layer, std::int64_t r) {
  const std::int64_t in = layer.linear.weight.size(1);
  // As torch::nn::Linear starts its weight.
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  at::Tensor down = torch::empty({r, in});
  if (!UninitializedScope::is_active()) down.uniform_(-bound, bound);
  std::string name = layer.ours;
  if (layer.num_rows < layer.linear.weight.size(0)) name += "_" + last_word(layer.theirs);
  std::replace(name.begin(), name.end(), '.', '_');
  torch::nn::Module& owner = adapter_module(*layer.module);
  Adapter adapter{layer, {}};
  adapter.tensors.down = owner.register_parameter(name + "_A", down);
  adapter.tensors.up = owner.register_parameter(name + "_B", torch::zeros({layer.num_rows, r}));
  adapter.tensors.first_row = layer.first_row;
  return adapter;
}

// Saves the adapters alone, and the base where it has no folder of its own.
class AdapterFormat final : public DerivedFormat {
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
    AdapterConfig saved = config;
    if (saved.base.empty()) {
      saved.base = (fs::absolute(folder) / "base_model").lexically_normal().string();
      std::error_code error;
      fs::create_directories(saved.base, error);
      if (error)
        throw ConfigError(fmt::format("'{}' cannot be made: {}", saved.base, error.message()));
      base().save(chain, saved.base);
    }
    const fs::path weights = fs::path(folder) / kAdapterWeightsFile;
    OutputFile config_file((fs::path(folder) / kAdapterConfigFile).string());
    HashedFile weights_file(weights.string());
    config_file.write(to_text(saved));
    write_safetensors(weights_file, named_tensors(), {{"format", "pt"}});
    config_file.commit();
    const FileDigest digest = weights_file.commit();
    sync_folder(folder, throw_as<ConfigError>);
    return {weights.filename().string(), digest.sha256};
  }

  NamedTensors named_tensors() const {
    NamedTensors tensors;
    for (const Adapter& adapter : adapters) {
      const std::string name = "base_model.model." + adapter.layer.theirs;
      tensors.emplace_back(name + ".lora_A.weight", adapter.tensors.down.detach());
      tensors.emplace_back(name + ".lora_B.weight", adapter.tensors.up.detach());
    }
    return tensors;
  }

  const AdapterConfig config;
  std::vector<Adapter> adapters;
  std::vector<at::Tensor> frozen;  // because of them
};

const AdapterFormat* adapter_format(const Chain& chain) {
  return dynamic_cast<const AdapterFormat*>(chain.format().get());
}

bool continues_text(const PublishedForm& form) {
  return form.config.find("LMHeadModel") != std::string::npos ||
         form.config.find("ForCausalLM") != std::string::npos;
}

}  // namespace

void add_adapters(Chain& chain, const LoraConfig& lora, const std::string& base) {
  if (lora.r < 1) throw ConfigError(fmt::format("adapters of rank {}: give 1 or more", lora.r));
  if (adapter_format(chain) != nullptr) throw ConfigError("the model has adapters already");
  const std::vector<Layer> layers = layers_of(chain);
  AdapterConfig config{lora, base, false, ""};
  if (config.lora.target_modules.empty()) config.lora.target_modules = usual_targets(layers);
  for (const std::string& target : config.lora.target_modules) check_target(layers, target);
  if (continues_text(published_form(chain))) config.task_type = "CAUSAL_LM";
  std::vector<Layer> chosen;
  for (const Layer& layer : layers) {
    const auto& targets = config.lora.target_modules;
    if (std::any_of(targets.begin(), targets.end(),
                    [&](const std::string& target) { return is_target(layer, target); }))
      chosen.push_back(layer);
  }
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
  const AdapterFormat* format = adapter_format(chain);
  if (format == nullptr) return;
  const torch::NoGradGuard no_grad;
  for (const Adapter& adapter : format->adapters) {
    const auto& [layer, tensors] = adapter;
    layer.linear.weight.narrow(0, layer.first_row, layer.num_rows)
        .addmm_(tensors.up, tensors.down, 1.0, layer.stage->adapter_scale());
    layer.linear.adapters->clear();
    if (layer.module->named_children().contains(kAdapterModule))
      layer.module->unregister_module(kAdapterModule);
  }
  for (const at::Tensor& parameter : format->frozen) parameter.requires_grad_(true);
  set_published_form(chain, PublishedForm(format->base().form()));
}

bool is_adapter_folder(const std::string& folder) {
  return path_exists((fs::path(folder) / kAdapterConfigFile).string()) &&
         !path_exists((fs::path(folder) / "config.json").string());
}

std::string base_of_adapters(const std::string& folder) {
  const std::string base = read_adapter_config(folder).base;
  // A folder that was moved has its base still inside of it.
  const fs::path beside = fs::path(folder) / base,
                 inside = fs::path(folder) / fs::path(base).filename();
  for (const fs::path& path : {fs::path(base), beside, inside}) {
    std::error_code ignored;
    if (!base.empty() && is_folder(path.string()) && !fs::equivalent(path, folder, ignored))
      return path.string();
  }
  throw DataError(
      fmt::format("'{}' holds adapters for '{}', which is no folder here: download that model and "
                  "set base_model_name_or_path in {} to its folder",
                  shown_path(folder), base, kAdapterConfigFile));
}

void load_and_merge_adapters(Chain& chain, const std::string& folder) {
  {
    const UninitializedScope the_file_gives_values;
    add_adapters(chain, read_adapter_config(folder).lora, base_of_adapters(folder));
  }
  load_safetensors((fs::path(folder) / kAdapterWeightsFile).string(),
                   adapter_format(chain)->named_tensors());
  merge_adapters(chain);
}

}  // namespace headroom
