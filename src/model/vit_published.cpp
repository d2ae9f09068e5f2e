// A vision transformer as Hugging Face's ViTForImageClassification has it.
#include "model/transformer_parts.h"
#include "model/vit.h"

namespace headroom {

void exchange(ConfigFile& file, VitConfig& config) {
  file.set_kind("ViTForImageClassification", "vit");
  exchange_encoder(file, config, 0.0);
  file.image_size(config.rows, config.columns, 224);
  file.size("patch_size", config.patch_size, 16, set_side);
  file.size("num_channels", config.channels, 3, set_side);
  file.number("layer_norm_eps", config.layer_norm_eps, 1e-12);
  file.only("hidden_act", std::string("gelu"));
  file.only("qkv_bias", true);
  file.num_labels(config.classes);
}

PublishedForm make_form(const VitConfig& config, ConfigFile file) {
  VitConfig written = config;
  exchange(file, written);
  PublishedForm form;
  form.config = file.text();
  form.rows = published_block_rows(
      "", {"vit.encoder.layer.*.", "layernorm_before", "attention.attention.query",
           "attention.attention.key", "attention.attention.value", "attention.output.dense",
           "layernorm_after", "intermediate.dense", "output.dense"});
  form.rows.push_back(
      {"embedding.patch_embeddings.projection.weight",
       {"vit.embeddings.patch_embeddings.projection.weight"},
       /*is_transposed=*/false,
       {config.hidden_size, config.channels, config.patch_size, config.patch_size}});
  form.rows.push_back({"embedding", {"vit.embeddings"}});
  form.rows.push_back({"head.layernorm", {"vit.layernorm"}});
  form.rows.push_back({"head.classifier", {"classifier"}});
  form.base = "vit.";
  form.head = {"classifier."};
  form.ignored = {"vit.pooler.*"};
  return form;
}

}  // namespace headroom
