// Our Llama against the usual one in PyTorch, with Hugging Face's names, from the same weights and
// tokens.

#include "model/llama.h"

#include "model/parity_run.h"

#include <fmt/ranges.h>

namespace headroom {
namespace {

// `sizes` are keys of both sides; `json` says the rest to PyTorch as `text` does to us.
void expect_parity(const std::string& name, const std::string& text, const std::string& json) {
  SCOPED_TRACE(name);
  constexpr std::int64_t kBatch = 3, kLength = 37, kVocabulary = 211;
  torch::manual_seed(11);
  const LlamaConfig config = llama_config(
      "llama", fmt::format("num_hidden_layers=3,num_attention_heads=6,hidden_size=48,"
                           "intermediate_size=100,max_position_embeddings={},vocab_size={},{}",
                           kLength, kVocabulary, text));
  const testing::ParityRun run("llama", make_llama(config));
  run.write_text(
      "config.json",
      fmt::format(
          R"({{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": {}, "hidden_size": 48, "intermediate_size": 100, "vocab_size": {}, "rms_norm_eps": {}, "rope_theta": {}, "tie_word_embeddings": {}, "length": {}, "batch": {}, "num_updates": {}{}}})",
          config.num_key_value_heads, kVocabulary, config.rms_norm_eps, config.rope_theta,
          config.tie_word_embeddings, kLength, kBatch, testing::kParityUpdates, json));
  const at::Tensor tokens =
      torch::randint(0, kVocabulary, {testing::kParityUpdates, kBatch, kLength + 1});
  run.write("tokens.bin", {tokens});
  run.compare("benchmarks/gpt/pytorch_llama.py", testing::text_batches(tokens));
}

TEST(LlamaParity, EqualsPyTorch) {
  expect_parity("llama", "num_key_value_heads=2,tie_word_embeddings=false", "");
}

TEST(LlamaParity, EqualsPyTorchAsQwen2) {
  expect_parity("qwen2",
                "num_key_value_heads=3,attention_bias=true,rms_norm_eps=1e-6,rope_theta=1e6",
                R"(, "attention_bias": true)");
}

TEST(LlamaParity, EqualsPyTorchWithScaledPositionsAndWideHeads) {
  expect_parity(
      "scaled",
      "num_key_value_heads=1,head_dim=12,attention_bias=true,attention_output_bias=true,"
      "rope_factor=4,rope_original_max_position_embeddings=64",
      R"(, "head_dim": 12, "attention_bias": true, "attention_output_bias": true, "rope_scaling": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})");
}

}  // namespace
}  // namespace headroom
