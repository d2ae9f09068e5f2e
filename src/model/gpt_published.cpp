// GPT-2 as Hugging Face's GPT2LMHeadModel and GPT2ForSequenceClassification have it.
#include "model/gpt_published.h"
#include <headroom/core/error.h>

#include <fmt/format.h>

namespace headroom {

void exchange(ConfigFile& file, GptConfig& config) {
  file.head(config.num_labels, "GPT2LMHeadModel", "GPT2ForSequenceClassification", "gpt2");
  file.size("n_layer", config.n_layer, 12, set_layers);
  file.size("n_head", config.n_head, 12);
  file.size("n_embd", config.n_embd, 768);
  file.size("n_positions", config.block_size, 1024);
  file.size("vocab_size", config.vocab_size, 50257);
  file.choice<GeluKind>("activation_function", config.gelu,
                        {{"gelu_new", GeluKind::kTanh},
                         {"gelu_pytorch_tanh", GeluKind::kTanh},
                         {"gelu", GeluKind::kExact}},
                        "gelu_new");
  double embedding = config.dropout, attention = config.dropout;
  file.probability("resid_pdrop", config.dropout, 0.1);
  file.probability("embd_pdrop", embedding, 0.1);
  file.probability("attn_pdrop", attention, 0.1);
  if (embedding != config.dropout || attention != config.dropout) {
    throw ConfigError(fmt::format(
        "config.json: resid_pdrop {}, embd_pdrop {} and attn_pdrop {} differ, and a GPT "
        "here has one dropout: set all three to the same",
        config.dropout, embedding, attention));
  }
  std::int64_t hidden = 4 * config.n_embd;
  file.size("n_inner", hidden, hidden);
  if (hidden != 4 * config.n_embd) {
    throw ConfigError(
        fmt::format("config.json: n_inner {} is not 4 x n_embd, as a GPT here has it", hidden));
  }
  file.only("layer_norm_epsilon", 1e-5);
  file.only("scale_attn_weights", true);
  file.only("scale_attn_by_inverse_layer_idx", false);
  file.only("tie_word_embeddings", true);
  file.section("headroom").flag("bias", config.bias, true);
}

PublishedForm make_form(const GptConfig& config, ConfigFile file) {
  GptConfig written = config;
  exchange(file, written);
  PublishedForm form;
  form.config = file.text();
  form.rows = {{"embedding", {"transformer"}},
               {"block*", {"transformer.h.*"}, /*is_transposed=*/true},
               {"head.ln_f", {"transformer.ln_f"}}};
  form.base = "transformer.";
  form.ignored = {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"};
  if (config.num_labels > 0) {
    form.rows.push_back({"head.score", {"score"}});
    form.head = {"score."};
    form.ignored.emplace_back("lm_head.weight");
  } else {
    form.ties = {{"lm_head.weight", "transformer.wte.weight"}};
    form.ignored.emplace_back("score.weight");
  }
  return form;
}

}  // namespace headroom
