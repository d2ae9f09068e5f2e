// Our BERT, ViT and CLIP against the usual ones in PyTorch, from the same weights and data.

#include "model/bert.h"
#include "model/clip.h"
#include "model/vit.h"

#include "model/parity_run.h"

namespace headroom {
namespace {

using testing::kParityUpdates;

const char* const kScript = "benchmarks/encoders/pytorch_encoders.py";

std::string encoder_json(const EncoderConfig& config) {
  return fmt::format(
      R"("hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "intermediate_size": {}, "num_updates": {})",
      config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
      config.intermediate_size, kParityUpdates);
}

TEST(EncoderParity, VitEqualsPyTorch) {
  constexpr std::int64_t kBatch = 5;
  torch::manual_seed(12);
  const VitConfig config = vit_config("vit-b16",
                                      "num_hidden_layers=3,num_attention_heads=4,hidden_size=48,"
                                      "intermediate_size=100,patch_size=3,rows=15,columns=12,"
                                      "channels=2,classes=7");
  const testing::ParityRun run("vit", make_vit(config));
  run.write_text(
      "config.json",
      fmt::format(
          R"({{"model": "vit", "batch": {}, "patch_size": 3, "rows": 15, "columns": 12, "channels": 2, "classes": 7, {}}})",
          kBatch, encoder_json(config)));
  const at::Tensor images = torch::randn({kParityUpdates, kBatch, 2, 15, 12}),
                   classes = torch::randint(0, 7, {kParityUpdates, kBatch});
  run.write("inputs.bin", {images});
  run.write("targets.bin", {classes});
  std::vector<MicroBatch> batches;
  for (std::int64_t i = 0; i < kParityUpdates; ++i)
    batches.push_back({{images[i]}, {classes[i]}, kBatch, kBatch});
  run.compare(kScript, batches);
}

// With padding: every third sample ends early, and what is to be guessed lies before.
TEST(EncoderParity, BertEqualsPyTorch) {
  constexpr std::int64_t kBatch = 3, kLength = 30, kChosen = 5, kVocabulary = 211;
  torch::manual_seed(13);
  const BertConfig config =
      bert_config("bert-base",
                  "num_hidden_layers=3,num_attention_heads=4,hidden_size=48,intermediate_size=100,"
                  "max_position_embeddings=37,dropout=0,"
                  "vocab_size=211,length=30");
  const testing::ParityRun run("bert", make_bert(config));
  run.write_text(
      "config.json",
      fmt::format(
          R"({{"model": "bert", "batch": {}, "vocab_size": {}, "max_position_embeddings": 37, "type_vocab_size": 2, {}}})",
          kBatch, kVocabulary, encoder_json(config)));
  const at::Tensor tokens = torch::randint(0, kVocabulary, {kParityUpdates, kBatch, kLength});
  const at::Tensor targets = torch::randint(0, kVocabulary, {kParityUpdates, kBatch, kChosen});
  const at::Tensor positions =
      std::get<1>(torch::rand({kParityUpdates, kBatch, 20}).topk(kChosen, -1));
  const at::Tensor mask = torch::ones({kParityUpdates, kBatch, kLength}, torch::kBool);
  mask.select(1, 2).slice(1, 20).fill_(false);
  run.write("inputs.bin", {tokens});
  run.write("targets.bin", {targets});
  run.write("positions.bin", {positions});
  run.write("mask.bin", {mask});
  std::vector<MicroBatch> batches;
  for (std::int64_t i = 0; i < kParityUpdates; ++i) {
    batches.push_back({{tokens[i], mask[i]}, {targets[i], positions[i]}, kBatch, kBatch * kChosen});
  }
  run.compare(kScript, batches);
}

TEST(EncoderParity, ClipEqualsPyTorch) {
  constexpr std::int64_t kBatch = 6, kLength = 11, kVocabulary = 53;
  torch::manual_seed(14);
  const ClipConfig config =
      clip_config("clip",
                  "vision_num_hidden_layers=2,vision_num_attention_heads=4,vision_hidden_size=48,"
                  "vision_intermediate_size=100,"
                  "text_num_hidden_layers=3,text_num_attention_heads=2,text_hidden_size=40,text_"
                  "intermediate_size=64,patch_size=3,"
                  "rows=15,columns=12,channels=2,vocab_size=53,length=11,projection_dim=24");
  const testing::ParityRun run("clip", make_clip(config));
  run.write_text(
      "config.json",
      fmt::format(
          R"({{"model": "clip", "batch": {}, "num_updates": {}, "patch_size": 3, "rows": 15, "columns": 12, "channels": 2,
                                 "vocab_size": {}, "length": {}, "projection_dim": 24, "vision": {{{}}}, "text": {{{}}}}})",
          kBatch, kParityUpdates, kVocabulary, kLength, encoder_json(config.vision),
          encoder_json(config.text)));
  const at::Tensor images = torch::randn({kParityUpdates, kBatch, 2, 15, 12}),
                   tokens = torch::randint(0, kVocabulary, {kParityUpdates, kBatch, kLength});
  const at::Tensor ends = torch::randint(0, kLength, {kParityUpdates, kBatch, 1});
  run.write("inputs.bin", {images});
  run.write("tokens.bin", {tokens});
  run.write("ends.bin", {ends});
  std::vector<MicroBatch> batches;
  for (std::int64_t i = 0; i < kParityUpdates; ++i)
    batches.push_back({{images[i], tokens[i], ends[i]}, {}, kBatch, kBatch});
  run.compare(kScript, batches);
}

}  // namespace
}  // namespace headroom
