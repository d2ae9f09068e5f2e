// BERT as Hugging Face's BertForMaskedLM and BertForSequenceClassification have it.
#include "model/bert.h"
#include "model/transformer_parts.h"

#include <algorithm>

namespace headroom {

void exchange(ConfigFile& file, BertConfig& config) {
  file.head(config.num_labels, "BertForMaskedLM", "BertForSequenceClassification", "bert");
  exchange_encoder(file, config, 0.1);
  file.size("max_position_embeddings", config.max_position_embeddings, 512);
  file.size("vocab_size", config.vocab_size, 30522);
  file.size("type_vocab_size", config.type_vocab_size, 2);
  if (config.num_labels > 0)
    file.probability("classifier_dropout", config.classifier_dropout, config.hidden_dropout_prob);
  file.only("hidden_act", std::string("gelu"));
  file.only("layer_norm_eps", 1e-12);
  file.only("position_embedding_type", std::string("absolute"));
  file.only("is_decoder", false);
  file.only("tie_word_embeddings", true);
  // The published vocabularies have the mask at 103.
  constexpr std::int64_t kPublishedMask = 103;
  ConfigFile ours = file.section("headroom");
  ours.size("length", config.length, config.max_position_embeddings);
  ours.size("mask_token", config.mask_token, std::min(kPublishedMask, config.vocab_size - 1));
  ours.probability("mlm_probability", config.mlm_probability, 0.15);
}

PublishedForm make_form(const BertConfig& config, ConfigFile file) {
  BertConfig written = config;
  if (written.length == 0) written.length = written.max_position_embeddings;
  if (written.mask_token < 0) written.mask_token = written.vocab_size - 1;
  exchange(file, written);
  PublishedForm form;
  form.config = file.text();
  form.rows = published_block_rows(
      "", {"bert.encoder.layer.*.", "attention.output.LayerNorm", "attention.self.query",
           "attention.self.key", "attention.self.value", "attention.output.dense",
           "output.LayerNorm", "intermediate.dense", "output.dense"});
  form.rows.push_back({"embedding", {"bert.embeddings"}});
  form.base = "bert.";
  if (config.num_labels > 0) {
    form.rows.push_back({"head.pooler", {"bert.pooler"}});
    form.rows.push_back({"head.classifier", {"classifier"}});
    form.head = {"bert.pooler.", "classifier."};
    form.ignored = {"cls.*", "bert.embeddings.position_ids"};
    return form;
  }
  form.rows.push_back({"head", {"cls.predictions"}});
  form.head = {"cls."};
  form.ties = {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
               {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
  form.ignored = {"bert.pooler.*", "cls.seq_relationship.*", "bert.embeddings.position_ids",
                  "classifier.*"};
  return form;
}

}  // namespace headroom
