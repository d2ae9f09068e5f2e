// Our GPT against the usual one in PyTorch, from the same weights and tokens.

#include <headroom/model/gpt.h>

#include "model/parity_run.h"

namespace headroom {
namespace {

constexpr std::int64_t kBatch = 3, kLength = 37, kUpdates = 20, kVocabulary = 211;

TEST(GptParity, EqualsPyTorch) {
  torch::manual_seed(11);
  const GptConfig config =
      gpt_config("gpt2", fmt::format("n_layer=3,n_head=4,n_embd=48,block_size={},vocab_size={}",
                                     kLength, kVocabulary));
  const testing::ParityRun run("gpt", make_gpt(config));
  const at::Tensor text = torch::randint(0, kVocabulary, {kUpdates, kBatch, kLength + 1});
  run.write_text("config.txt", fmt::format("{} {} {} {} {} {} {}", config.n_layer, config.n_head,
                                           config.n_embd, kLength, kVocabulary, kBatch, kUpdates));
  run.write("tokens.bin", {text});
  std::vector<MicroBatch> batches;
  for (std::int64_t i = 0; i < kUpdates; ++i) {
    batches.push_back({{text[i].slice(1, 0, kLength).contiguous()},
                       {text[i].slice(1, 1).contiguous()},
                       kBatch,
                       kBatch * kLength});
  }
  run.compare("benchmarks/gpt/pytorch_gpt.py", batches);
}

}  // namespace
}  // namespace headroom
