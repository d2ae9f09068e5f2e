// CLIP as Hugging Face's CLIPModel has it.
#include "model/clip.h"
#include "model/transformer_parts.h"

namespace headroom {
namespace {

void exchange_tower(ConfigFile file, EncoderConfig& config, GeluKind& gelu,
                    const EncoderConfig& if_absent) {
  file.size("hidden_size", config.hidden_size, if_absent.hidden_size);
  file.size("num_hidden_layers", config.num_hidden_layers, if_absent.num_hidden_layers, set_layers);
  file.size("num_attention_heads", config.num_attention_heads, if_absent.num_attention_heads);
  file.size("intermediate_size", config.intermediate_size, if_absent.intermediate_size);
  file.probability("attention_dropout", config.attention_probs_dropout_prob, 0.0);
  file.probability("hidden_dropout_prob", config.hidden_dropout_prob, 0.0);
  file.only("layer_norm_eps", 1e-5);
  file.choice<GeluKind>("hidden_act", gelu,
                        {{"quick_gelu", GeluKind::kQuick}, {"gelu", GeluKind::kExact}},
                        "quick_gelu");
}

PublishedBlockNames block_names(const std::string& tower) {
  return {tower + "encoder.layers.*.",
          "layer_norm1",
          "self_attn.q_proj",
          "self_attn.k_proj",
          "self_attn.v_proj",
          "self_attn.out_proj",
          "layer_norm2",
          "mlp.fc1",
          "mlp.fc2"};
}

}  // namespace

void exchange(ConfigFile& file, ClipConfig& config) {
  file.set_kind("CLIPModel", "clip");
  file.size("projection_dim", config.projection_dim, 512);
  const ClipConfig published = clip_config("clip-vit-b32");
  ConfigFile vision = file.section("vision_config"), text = file.section("text_config");
  exchange_tower(vision, config.vision, config.vision_gelu, published.vision);
  exchange_tower(text, config.text, config.text_gelu, published.text);
  vision.image_size(config.rows, config.columns, published.rows);
  vision.size("patch_size", config.patch_size, published.patch_size, set_side);
  vision.size("num_channels", config.channels, published.channels, set_side);
  text.size("max_position_embeddings", config.length, published.length);
  text.size("vocab_size", config.vocab_size, published.vocab_size);
}

PublishedForm make_form(const ClipConfig& config, ConfigFile file) {
  ClipConfig written = config;
  exchange(file, written);
  PublishedForm form;
  form.config = file.text();
  const std::int64_t width = config.vision.hidden_size, patch = config.patch_size;
  const std::int64_t num_tokens = (config.rows / patch) * (config.columns / patch) + 1;
  form.rows = published_block_rows("vision_", block_names("vision_model."));
  for (PublishedRow& row : published_block_rows("text_", block_names("text_model.")))
    form.rows.push_back(std::move(row));
  const std::vector<PublishedRow> others = {
      {"vision_embedding.class_embedding",
       {"vision_model.embeddings.class_embedding"},
       false,
       {width}},
      {"vision_embedding.patch_embedding.weight",
       {"vision_model.embeddings.patch_embedding.weight"},
       false,
       {width, config.channels, patch, patch}},
      {"vision_embedding.position_embedding.weight",
       {"vision_model.embeddings.position_embedding.weight"},
       false,
       {num_tokens, width}},
      {"vision_embedding.pre_layrnorm", {"vision_model.pre_layrnorm"}},
      {"vision_head.post_layernorm", {"vision_model.post_layernorm"}},
      {"vision_head.visual_projection", {"visual_projection"}},
      {"text_embedding", {"text_model.embeddings"}},
      {"head.final_layer_norm", {"text_model.final_layer_norm"}},
      {"head.text_projection", {"text_projection"}},
      {"loss.logit_scale", {"logit_scale"}}};
  form.rows.insert(form.rows.end(), others.begin(), others.end());
  form.ignored = {"*.position_ids"};
  return form;
}

}  // namespace headroom
