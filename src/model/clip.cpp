#include "model/clip.h"

#include <headroom/core/error.h>
#include <headroom/model/chain.h>
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/patch_embedding.h"
#include "ops/rows_at.h"

#include "model/family.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>

#include <cmath>

namespace headroom {
namespace {

EncoderConfig encoder(std::int64_t width, std::int64_t layers, std::int64_t heads) {
  EncoderConfig config;
  config.hidden_size = width;
  config.num_hidden_layers = layers;
  config.num_attention_heads = heads;
  config.intermediate_size = 4 * width;
  return config;
}

const Presets<ClipConfig>& clip_presets() {
  static const Presets<ClipConfig> all = [] {
    ClipConfig small, published;
    small.vision = small.text = encoder(128, 4, 4);
    published.vision = encoder(768, 12, 12);
    published.text = encoder(512, 12, 8);
    published.vision_gelu = published.text_gelu = GeluKind::kQuick;
    published.patch_size = 32;
    published.channels = 3;
    published.rows = published.columns = 224;
    published.vocab_size = 49408;
    published.length = 77;
    published.projection_dim = 512;
    return Presets<ClipConfig>{{"clip", small}, {"clip-vit-b32", published}};
  }();
  return all;
}

std::int64_t num_patches(const ClipConfig& config) {
  return (config.rows / config.patch_size) * (config.columns / config.patch_size);
}
std::int64_t patch_values(const ClipConfig& config) {
  return config.channels * config.patch_size * config.patch_size;
}
Weights make_weight(at::IntArrayRef sizes) { return Weights(normal(sizes), 0); }

// What the stages below have in common.
class ClipStage : public Stage {
 public:
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 protected:
  using Stage::Stage;
  GroupModule& group() { return *module_; }
  double dropout_while_training(double p) const { return module_->is_training() ? p : 0.0; }

 private:
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
};

class VisionEmbedding final : public ClipStage {
 public:
  explicit VisionEmbedding(const ClipConfig& config)
      : ClipStage("vision_embedding"),
        patch_size_(config.patch_size),
        dropout_(config.vision.hidden_dropout_prob),
        class_(group().add_parameter("class_embedding", normal({1, 1, config.vision.hidden_size}))),
        patches_(group().add("patch_embedding",
                             make_weight({config.vision.hidden_size, patch_values(config)}))),
        positions_(group().add("position_embedding", make_weight({1, num_patches(config) + 1,
                                                                  config.vision.hidden_size}))),
        norm_(group().add("pre_layrnorm", make_norm(config.vision.hidden_size))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    const at::Tensor x =
        patch_embedding(inputs.at(0), patch_size_,
                        {patches_->weight, {}, class_, positions_->weight});  // (B, T, C)
    return {dropout(layer_norm(x, norm_->weight, norm_->bias), dropout_while_training(dropout_))};
  }

 private:
  std::int64_t patch_size_;
  double dropout_;
  at::Tensor class_;
  Weights patches_, positions_, norm_;
};

// (B, projection_dim), of the class token.
class VisionHead final : public ClipStage {
 public:
  explicit VisionHead(const ClipConfig& config)
      : ClipStage("vision_head"),
        norm_(group().add("post_layernorm", make_norm(config.vision.hidden_size))),
        projection_(group().add("visual_projection",
                                make_weight({config.projection_dim, config.vision.hidden_size}))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    return {linear(layer_norm(inputs.at(0).select(1, 0), norm_->weight, norm_->bias),
                   projection_->weight, projection_->bias)};
  }

 private:
  Weights norm_, projection_;
};

// Starts the second tower; what the first one made is handed on beside it.
class TextEmbedding final : public ClipStage {
 public:
  explicit TextEmbedding(const ClipConfig& config)
      : ClipStage("text_embedding"),
        dropout_(config.text.hidden_dropout_prob),
        tokens_(group().add("token_embedding",
                            make_weight({config.vocab_size, config.text.hidden_size}))),
        positions_(group().add("position_embedding",
                               make_weight({config.length, config.text.hidden_size}))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor x = token_position_embedding(micro.inputs.at(1), tokens_->weight,
                                                  positions_->weight);  // (B, T, C)
    return {inputs.at(0), dropout(x, dropout_while_training(dropout_))};
  }

 private:
  double dropout_;
  Weights tokens_, positions_;
};

at::Tensor normalized(const at::Tensor& x) {
  return x / x.square().sum({-1}, /*keepdim=*/true).sqrt();
}

// Ends the second tower: (B, projection_dim) of the images and of the texts, each of length 1.
class ClipHead final : public ClipStage {
 public:
  explicit ClipHead(const ClipConfig& config)
      : ClipStage("head"),
        norm_(group().add("final_layer_norm", make_norm(config.text.hidden_size))),
        projection_(group().add("text_projection",
                                make_weight({config.projection_dim, config.text.hidden_size}))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor end = rows_at(inputs.at(1), micro.inputs.at(2));  // (B, C)
    const at::Tensor texts =
        linear(layer_norm(end, norm_->weight, norm_->bias), projection_->weight, projection_->bias);
    return {normalized(inputs[0]), normalized(texts)};
  }

 private:
  Weights norm_, projection_;
};

// Compares every image with every text.
class ClipLoss final : public ClipStage, public EmbeddingLoss {
 public:
  ClipLoss()
      : ClipStage("loss"),
        scale_(group().add_parameter("logit_scale", torch::full({}, std::log(1.0 / 0.07)))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    const at::Tensor scores =
        at::mm(inputs.at(0), inputs.at(1).t()) * scale_.exp();  // (B, B): images by texts
    // Given its size: where only bytes are counted, arange would resize it unseen (LibTorch 2.14).
    at::Tensor diagonal = at::empty({scores.size(0)}, scores.options().dtype(at::kLong));
    at::arange_out(diagonal, scores.size(0));
    MicroBatch matches;
    matches.targets = {diagonal};
    const at::Tensor by_image = summed_cross_entropy({scores}, matches),
                     by_text = summed_cross_entropy({scores.t().contiguous()}, matches);
    std::vector<at::Tensor> results{(by_image + by_text) / 2};
    if (!module()->is_training()) results.push_back(count_correct({scores}, matches));
    return results;
  }
  bool couples_samples() const override { return true; }

 private:
  at::Tensor scale_;
};

void add_encoder_setters(const std::string& prefix, EncoderConfig& config, ConfigSetters& setters) {
  for (auto& [key, setter] : encoder_setters(config)) setters[prefix + key] = setter;
}

ConfigSetters setters_of(ClipConfig& config) {
  ConfigSetters setters{{"patch_size", set_side(config.patch_size)},
                        {"image_size", set_sides({&config.rows, &config.columns})},
                        {"rows", set_side(config.rows)},
                        {"columns", set_side(config.columns)},
                        {"channels", set_side(config.channels)},
                        {"vocab_size", set_size(config.vocab_size)},
                        {"length", set_size(config.length)},
                        {"projection_dim", set_size(config.projection_dim)},
                        {"gelu", [&](const std::string& key, const std::string& value) {
                           config.vision_gelu = config.text_gelu =
                               parse_word(key, value, "quick", "exact") ? GeluKind::kQuick
                                                                        : GeluKind::kExact;
                         }}};
  add_encoder_setters("vision_", config.vision, setters);
  add_encoder_setters("text_", config.text, setters);
  return setters;
}

ZooModel clip_with_input(const ClipConfig& config) {
  ModelInput input;
  input.kind = ModelInput::Kind::kPairs;
  input.channels = config.channels;
  input.rows = config.rows;
  input.columns = config.columns;
  input.length = config.length;
  input.vocabulary = config.vocab_size;
  if (config.channels == 3) {  // as the published ones
    input.pixel_mean = {0.48145466, 0.4578275, 0.40821073};
    input.pixel_deviation = {0.26862954, 0.26130258, 0.27577711};
  }
  return {make_clip(config), input};
}

ZooModel make_zoo_clip(const std::string& name, const std::string& text) {
  return clip_with_input(clip_config(name, text));
}

ZooModel read_zoo_clip(ConfigFile& file) { return read_published(file, clip_with_input); }

}  // namespace

ModelFamily clip_family() {
  ClipConfig config;
  return {"images with their texts, as CLIP",
          clip_names(),
          keys_of(setters_of(config)),
          make_zoo_clip,
          {"clip"},
          read_zoo_clip};
}

std::vector<std::string> clip_names() { return names_of(clip_presets()); }

ClipConfig clip_config(const std::string& name, const std::string& text) {
  ClipConfig config = find_preset(clip_presets(), name);
  read_config("a CLIP", text, setters_of(config));
  num_parameters(config);  // checks the sizes
  return config;
}

std::int64_t num_parameters(const ClipConfig& config) {
  const std::int64_t blocks =
      num_block_parameters(config.vision) + num_block_parameters(config.text);
  check_patches(config.rows, config.columns, config.patch_size);
  for (const std::int64_t size :
       {config.channels, config.vocab_size, config.length, config.projection_dim}) {
    if (size < 1) throw ConfigError("every size of a CLIP must be at least 1");
  }
  const std::int64_t width = config.vision.hidden_size, text_width = config.text.hidden_size;
  const std::int64_t vision = (1 + patch_values(config) + num_patches(config) + 1 + 4) * width;
  const std::int64_t text = (config.vocab_size + config.length + 2) * text_width;
  return vision + text + blocks + config.projection_dim * (width + text_width) + 1;
}

Chain make_clip(const ClipConfig& config) {
  num_parameters(config);  // checks the sizes
  Chain chain;
  EncoderBlockOptions options;
  chain.add(std::make_shared<VisionEmbedding>(config));
  options.name_prefix = "vision_";
  options.gelu = config.vision_gelu;
  for (std::int64_t layer = 0; layer < config.vision.num_hidden_layers; ++layer) {
    chain.add(make_encoder_block(config.vision, layer, "clip_vision_block", options));
  }
  chain.add(std::make_shared<VisionHead>(config));
  chain.add(std::make_shared<TextEmbedding>(config));
  options.name_prefix = "text_";
  options.gelu = config.text_gelu;
  options.causal = true;
  for (std::int64_t layer = 0; layer < config.text.num_hidden_layers; ++layer) {
    chain.add(make_encoder_block(config.text, layer, "clip_text_block", options));
  }
  chain.add(std::make_shared<ClipHead>(config));
  chain.add(std::make_shared<ClipLoss>());
  set_published_form(chain, make_form(config));
  return chain;
}

}  // namespace headroom
