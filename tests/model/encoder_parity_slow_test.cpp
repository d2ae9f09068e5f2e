// Our ViT against the usual one in PyTorch, from the same weights and data.

#include <headroom/model/vit.h>

#include "model/parity_run.h"

#include <fmt/ranges.h>

namespace headroom {
namespace {

constexpr std::int64_t kUpdates = 20;
const char* const kScript = "benchmarks/encoders/pytorch_encoders.py";

std::string encoder_json(const EncoderConfig& config) {
  return fmt::format(R"("hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "intermediate_size": {}, "num_updates": {})",
                     config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size, kUpdates);
}

TEST(EncoderParity, VitEqualsPyTorch) {
  constexpr std::int64_t kBatch = 5;
  torch::manual_seed(12);
  const VitConfig config =
      vit_config("vit-b16",
                 "num_hidden_layers=3,num_attention_heads=4,hidden_size=48,intermediate_size=100,patch_size=3,rows=15,columns=12,"
                 "channels=2,classes=7");
  const testing::ParityRun run("vit", make_vit(config),
                               [](const std::string& name) { return fmt::format("{}", fmt::join(vit_parameter_names(name), " ")); });
  run.write_text(
      "config.json",
      fmt::format(R"({{"model": "vit", "batch": {}, "patch_size": 3, "rows": 15, "columns": 12, "channels": 2, "classes": 7, {}}})", kBatch,
                  encoder_json(config)));
  const at::Tensor images = torch::randn({kUpdates, kBatch, 2, 15, 12}), classes = torch::randint(0, 7, {kUpdates, kBatch});
  run.write("inputs.bin", {images});
  run.write("targets.bin", {classes});
  std::vector<MicroBatch> batches;
  for (std::int64_t i = 0; i < kUpdates; ++i) batches.push_back({{images[i]}, {classes[i]}, kBatch, kBatch});
  run.compare(kScript, batches);
}

}  // namespace
}  // namespace headroom
