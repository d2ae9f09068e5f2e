#include "model/vit.h"

#include <headroom/core/error.h>
#include "ops/dropout.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/patch_embedding.h"

#include "model/classifier.h"
#include "model/family.h"
#include "model/image_parts.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace headroom {
namespace {

const Presets<VitConfig>& vit_presets() {
  static const Presets<VitConfig> all = [] {
    const auto published = [](std::int64_t width, std::int64_t layers, std::int64_t heads) {
      VitConfig config;
      config.hidden_size = width;
      config.num_hidden_layers = layers;
      config.num_attention_heads = heads;
      config.intermediate_size = 4 * width;
      config.patch_size = 16;
      config.channels = 3;
      config.rows = config.columns = 224;
      config.classes = 1000;
      return config;
    };
    return Presets<VitConfig>{{"vit", VitConfig()},
                              {"vit-b16", published(768, 12, 12)},
                              {"vit-l16", published(1024, 24, 16)}};
  }();
  return all;
}

std::int64_t num_patches(const VitConfig& config) {
  return (config.rows / config.patch_size) * (config.columns / config.patch_size);
}
std::int64_t patch_values(const VitConfig& config) {
  return config.channels * config.patch_size * config.patch_size;
}

class VitEmbedding final : public Stage {
 public:
  explicit VitEmbedding(const VitConfig& config)
      : Stage("embedding"),
        config_(config),
        cls_token_(module_->add_parameter("cls_token", normal({1, 1, config.hidden_size}))),
        positions_(module_->add_parameter(
            "position_embeddings", normal({1, num_patches(config) + 1, config.hidden_size}))),
        projection_(
            module_->add("patch_embeddings", std::make_shared<GroupModule>())
                ->add("projection", make_linear(patch_values(config), config.hidden_size))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    const at::Tensor& images = inputs.at(0);
    if (images.sizes().slice(1) !=
        at::IntArrayRef({config_.channels, config_.rows, config_.columns})) {
      throw DataError(
          fmt::format("images are ({}), but the model reads ({}, {}, {}): set channels, rows and "
                      "columns in --model_config",
                      fmt::join(images.sizes().slice(1), ", "), config_.channels, config_.rows,
                      config_.columns));
    }
    const at::Tensor x = patch_embedding(
        images, config_.patch_size,
        {projection_->weight, projection_->bias, cls_token_, positions_});  // (B, T, C)
    return {dropout(x, module_->is_training() ? config_.hidden_dropout_prob : 0.0)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  VitConfig config_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  at::Tensor cls_token_, positions_;
  Weights projection_;
};

class VitHead final : public Stage {
 public:
  explicit VitHead(const VitConfig& config)
      : Stage("head"),
        norm_eps_(config.layer_norm_eps),
        layernorm_(module_->add("layernorm", make_norm(config.hidden_size))),
        classifier_(module_->add("classifier", make_linear(config.hidden_size, config.classes))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor first = inputs.at(0).select(
        1, 0);  // (B, C): a norm is of one token, and only the class token's is used
    const at::Tensor scores =
        linear(layer_norm(first, layernorm_->weight, layernorm_->bias, norm_eps_),
               classifier_->weight, classifier_->bias);
    return classifier_results(scores, micro, module_->is_training());
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  double norm_eps_;
  Weights layernorm_, classifier_;
};

ConfigSetters setters_of(VitConfig& config) {
  ConfigSetters setters = encoder_setters(config);
  setters.insert({{"patch_size", set_side(config.patch_size)},
                  {"image_size", set_sides({&config.rows, &config.columns})},
                  {"rows", set_side(config.rows)},
                  {"columns", set_side(config.columns)},
                  {"channels", set_side(config.channels)},
                  {"classes", set_size(config.classes)}});
  return setters;
}

ZooModel vit_with_input(const VitConfig& config) {
  ModelInput input = image_input({config.channels, config.rows, config.columns, config.classes});
  if (config.channels == 3) {  // as the published ones
    input.pixel_mean.assign(3, 0.5);
    input.pixel_deviation.assign(3, 0.5);
  }
  return {make_vit(config), input};
}

ZooModel make_zoo_vit(const std::string& name, const std::string& text) {
  return vit_with_input(vit_config(name, text));
}

ZooModel read_zoo_vit(ConfigFile& file) { return read_published(file, vit_with_input); }

}  // namespace

ModelFamily vit_family() {
  VitConfig config;
  return {"vision transformers", vit_names(), keys_of(setters_of(config)),
          make_zoo_vit,          {"vit"},     read_zoo_vit};
}

std::vector<std::string> vit_names() { return names_of(vit_presets()); }

VitConfig vit_config(const std::string& name, const std::string& text) {
  VitConfig config = find_preset(vit_presets(), name);
  read_config("a ViT", text, setters_of(config));
  num_parameters(config);  // checks the sizes
  return config;
}

std::int64_t num_parameters(const VitConfig& config) {
  const std::int64_t blocks = num_block_parameters(config), width = config.hidden_size;
  check_patches(config.rows, config.columns, config.patch_size);
  if (config.channels < 1 || config.classes < 1)
    throw ConfigError("every size of a ViT must be at least 1");
  const std::int64_t embedding =
      (patch_values(config) + 1) * width + width + (num_patches(config) + 1) * width;
  return embedding + blocks + 2 * width + (width + 1) * config.classes;
}

Chain make_vit(const VitConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  chain.add(std::make_shared<VitEmbedding>(config));
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    chain.add(make_encoder_block(config, layer, "vit_block",
                                 {NormPlace::kBefore, config.layer_norm_eps, false, ""}));
  }
  chain.add(std::make_shared<VitHead>(config));
  set_published_form(chain, make_form(config));
  return chain;
}

}  // namespace headroom
