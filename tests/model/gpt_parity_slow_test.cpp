// Our GPT against the usual one in PyTorch, from the same weights and tokens.

#include <headroom/model/gpt.h>

#include "model/parity_run.h"

namespace headroom {
namespace {

TEST(GptParity, EqualsPyTorch) {
  constexpr std::int64_t kBatch = 3, kLength = 37, kVocabulary = 211;
  torch::manual_seed(11);
  const GptConfig config =
      gpt_config("gpt2", fmt::format("n_layer=3,n_head=4,n_embd=48,block_size={},vocab_size={}",
                                     kLength, kVocabulary));
  const testing::ParityRun run("gpt", make_gpt(config));
  const at::Tensor text =
      torch::randint(0, kVocabulary, {testing::kParityUpdates, kBatch, kLength + 1});
  run.write_text("config.txt",
                 fmt::format("{} {} {} {} {} {} {}", config.n_layer, config.n_head, config.n_embd,
                             kLength, kVocabulary, kBatch, testing::kParityUpdates));
  run.write("tokens.bin", {text});
  run.compare("benchmarks/gpt/pytorch_gpt.py", testing::text_batches(text));
}

}  // namespace
}  // namespace headroom
