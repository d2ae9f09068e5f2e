// Trains BERT and ViT here and in PyTorch interleaved, update by update, and prints how they
// compare: samples per second and peak memory. Machines drift by tens of percent within a minute,
// so only ratios of neighbours count.
//
//   encoders_benchmark [bert|vit|bert-base|vit-b16|both] [updates]
//
// "both" is bert and vit. PyTorch is given the matrix kernels that this program uses, and runs in
// several ways: nn.TransformerEncoder or blocks that are written out; for a BERT, logits of every
// token, as usual, or of the chosen ones alone, as here.

#include <headroom/core/runtime.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include "model/bert.h"
#include "model/vit.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "chain_updates.h"
#include "gpt/pytorch_process.h"
#include "timing.h"

namespace {

using namespace headroom;
using headroom::benchmark::ChainUpdates;
using headroom::benchmark::median;

struct Way {
  std::string name;
  std::string json;
};

struct Case {
  std::string name;
  std::string json;  // of the model in PyTorch
  ChainUpdates ours;
  std::vector<Way> ways;
};

std::string encoder_json(const EncoderConfig& config, std::int64_t batch) {
  return fmt::format(
      R"("hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "intermediate_size": {}, "dropout": {}, "batch": {}, "threads": {})",
      config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
      config.intermediate_size, config.hidden_dropout_prob, batch, at::get_num_threads());
}

MicroBatch load(const Dataset& data, std::int64_t batch) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(batch));
  std::iota(indices.begin(), indices.end(), 0);
  return data.load(indices);
}

Case bert_case(const std::string& name, const std::string& text, std::int64_t batch) {
  const BertConfig config = bert_config("bert-base", text);
  const Masking masking{num_masked(config), config.mask_token, 1};
  const auto data = make_synthetic_tokens(batch, config.length, config.vocab_size, 1, masking);
  return {
      fmt::format("{} ({} layers, width {}, T {}, B {}, V {}, dropout {}; {:.1f}M parameters)",
                  name, config.num_hidden_layers, config.hidden_size, config.length, batch,
                  config.vocab_size, config.hidden_dropout_prob,
                  static_cast<double>(num_parameters(config)) / 1e6),
      fmt::format(
          R"("model": "bert", "vocab_size": {}, "max_position_embeddings": {}, "type_vocab_size": {}, "length": {}, "num_masked": {}, {})",
          config.vocab_size, config.max_position_embeddings, config.type_vocab_size, config.length,
          num_masked(config), encoder_json(config, batch)),
      ChainUpdates(make_bert(config), load(*data, batch)),
      {{"nn.TransformerEncoder, all logits", R"("way": "layers", "head": "all")"},
       {"nn.TransformerEncoder, chosen logits", R"("way": "layers", "head": "chosen")"},
       {"written out, all logits", R"("way": "written", "head": "all")"},
       {"written out, chosen logits", R"("way": "written", "head": "chosen")"}}};
}

Case vit_case(const std::string& name, const std::string& text, std::int64_t batch) {
  const VitConfig config = vit_config("vit-b16", text);
  const auto data =
      make_synthetic_images(batch, config.channels, config.rows, config.columns, config.classes, 1);
  return {
      fmt::format("{} ({} layers, width {}, {} x {} x {}, patches of {}, B {}; {:.1f}M parameters)",
                  name, config.num_hidden_layers, config.hidden_size, config.channels, config.rows,
                  config.columns, config.patch_size, batch,
                  static_cast<double>(num_parameters(config)) / 1e6),
      fmt::format(
          R"("model": "vit", "patch_size": {}, "channels": {}, "rows": {}, "columns": {}, "classes": {}, {})",
          config.patch_size, config.channels, config.rows, config.columns, config.classes,
          encoder_json(config, batch)),
      ChainUpdates(make_vit(config), load(*data, batch)),
      {{"nn.TransformerEncoder", R"("way": "layers")"}, {"written out", R"("way": "written")"}}};
}

// `make` makes the case, so that its memory is counted.
template <class Make>
void compare(const Make& make, int updates) {
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  MemoryMeter::instance().reset_peak();
  Case c = make();
  std::vector<std::unique_ptr<PyTorchProcess>> theirs;
  for (const Way& way : c.ways) {
    theirs.push_back(std::make_unique<PyTorchProcess>(fmt::format("'{{{}, {}}}'", c.json, way.json),
                                                      false, "pytorch_encoders.py"));
  }
  std::vector<double> our_times;
  std::vector<std::vector<double>> their_times(theirs.size()), ratios(theirs.size());
  for (int i = 0; i <= updates; ++i) {
    for (std::size_t way = 0; way < theirs.size(); ++way) {
      const double our_time = c.ours.update(), their_time = theirs[way]->update();
      if (i == 0) continue;  // both warm up
      our_times.push_back(our_time);
      their_times[way].push_back(their_time);
      ratios[way].push_back(their_time / our_time);
    }
  }
  static const std::string version = headroom::benchmark::peer_version();
  const double mebi = 1 << 20,
               our_bytes = static_cast<double>(MemoryMeter::instance().peak_bytes() - live);
  fmt::print("{}\n  ours: {:.3f} s per update (median), tensors {:.0f} MiB\n", c.name,
             median(our_times), our_bytes / mebi);
  for (std::size_t way = 0; way < theirs.size(); ++way) {
    const double bytes = theirs[way]->finish();
    fmt::print(
        "  PyTorch {} {:37} {:.3f} s: ours is {:.2f}x as fast (median of neighbours), in {:.0f}% "
        "of {:.0f} MiB\n",
        version, c.ways[way].name, median(their_times[way]), median(ratios[way]),
        100 * our_bytes / bytes, bytes / mebi);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "both";
  const int updates = argc > 2 ? std::atoi(argv[2]) : 5;
  configure_threads(0);
  MemoryMeter::instance();
  headroom::benchmark::print_setting();
  torch::manual_seed(0);
  const std::string small =
      "hidden_size=384,num_hidden_layers=6,num_attention_heads=6,intermediate_size=1536";
  if (which == "bert" || which == "both")
    compare([&] { return bert_case("bert", small + ",length=128", 8); }, updates);
  if (which == "vit" || which == "both")
    compare([&] { return vit_case("vit", small, 8); }, updates);
  if (which == "bert-base")
    compare([] { return bert_case("bert-base", "length=128", 8); }, updates);
  if (which == "vit-b16") compare([] { return vit_case("vit-b16", "", 4); }, updates);
  return 0;
}
