#pragma once

// What the transformers of the zoo are made of.

#include <headroom/model/chain.h>
#include <headroom/ops/transformer.h>
#include "ops/cached_attention.h"

#include "model/adaptable.h"
#include "model/config_file.h"
#include "model/config_text.h"
#include "model/encoder.h"
#include "model/published.h"

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

inline constexpr double kInitialDeviation = 0.02;

/// A weight and perhaps a bias; what is done with them is the stage's business.
class WeightsImpl : public torch::nn::Module {
 public:
  WeightsImpl(const at::Tensor& initial_weight, std::int64_t bias_size)
      : weight(register_parameter("weight", initial_weight)),
        bias(bias_size > 0 ? register_parameter("bias", torch::zeros({bias_size})) : at::Tensor()) {
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Weights);

inline at::Tensor normal(at::IntArrayRef sizes, double deviation = kInitialDeviation) {
  at::Tensor values = torch::empty(sizes);
  return UninitializedScope::is_active() ? values : values.normal_(0.0, deviation);
}
inline Weights make_linear(std::int64_t in, std::int64_t out, double deviation = kInitialDeviation,
                           bool bias = true) {
  return Weights(normal({out, in}, deviation), bias ? out : 0);
}
inline Weights make_norm(std::int64_t width, bool bias = true) {
  return Weights(torch::ones({width}), bias ? width : 0);
}

class GroupModule : public torch::nn::Module {
 public:
  template <class Holder>
  Holder add(const std::string& name, Holder child) {
    return register_module(name, std::move(child));
  }
  at::Tensor add_parameter(const std::string& name, const at::Tensor& initial) {
    return register_parameter(name, initial);
  }
};

/// Where the norms of a block are: before its halves, or after each.
enum class NormPlace : int { kBefore, kAfter };

/// A transformer block. `module` owns the weights; dropout happens while it trains. A second input
/// of the micro-batch says what may be seen: (B, T) bool, which tokens; (B, T) int32, for each
/// token the first one.
class BlockStage final : public Stage, public AdaptableStage {
 public:
  BlockStage(std::string name, std::string kind, std::shared_ptr<torch::nn::Module> module,
             AttentionWeights attention, MlpWeights mlp, BlockOptions options,
             NormPlace norms = NormPlace::kBefore)
      : Stage(std::move(name)),
        kind_(std::move(kind)),
        module_(std::move(module)),
        attention_(std::move(attention)),
        mlp_(std::move(mlp)),
        options_(std::move(options)),
        norms_(norms) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int option) override;
  std::vector<std::string> options() const override { return block_keep_names(options_.gated); }
  int half_option() const override { return static_cast<int>(BlockKeep::kNoGeluNorms); }
  int num_half_options() const override {
    return static_cast<int>(BlockKeep::kAttention) - half_option() + 1;
  }
  int half_compute_option() const override { return static_cast<int>(BlockKeep::kNoGelu); }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }
  std::string kind() const override { return kind_; }

  std::vector<Layer> adaptable_layers() override;
  void set_adapter_factors(double scale, double dropout_p) override {
    options_.adapter_scale = scale;
    options_.adapter_dropout_p = dropout_p;
  }
  double adapter_scale() const override { return options_.adapter_scale; }

  /// True when a text can go through the block piece by piece: no token sees later ones.
  bool can_decode() const { return norms_ == NormPlace::kBefore && options_.attention.causal; }
  /// Room for the keys and values of `capacity` tokens of one text.
  KeyValueCache make_cache(std::int64_t capacity) const;
  /// The block for the tokens of x (1, T, C), which follow those in the cache; see
  /// cached_attention(). Without gradients and dropout.
  at::Tensor decode(const at::Tensor& x, KeyValueCache& cache) const;

 private:
  std::string kind_;
  std::shared_ptr<torch::nn::Module> module_;
  AttentionWeights attention_;
  MlpWeights mlp_;
  BlockOptions options_;
  NormPlace norms_;
};

/// The keys of an EncoderConfig, with "dropout" for both kinds at once.
ConfigSetters encoder_setters(EncoderConfig& config);

/// Of all blocks. Throws ConfigError on sizes that do not fit each other.
std::int64_t num_block_parameters(const EncoderConfig& config);

struct EncoderBlockOptions {
  NormPlace norms = NormPlace::kBefore;
  double norm_eps = 1e-5;
  bool causal = false;
  std::string name_prefix;  ///< of "block0"
  GeluKind gelu = GeluKind::kExact;
};

/// Block `index` of an encoder. `kind` is "vit_block", say.
std::shared_ptr<Stage> make_encoder_block(const EncoderConfig& config, std::int64_t index,
                                          const std::string& kind,
                                          const EncoderBlockOptions& encoder_options);

/// Throws ConfigError unless images of this size are whole patches.
void check_patches(std::int64_t rows, std::int64_t columns, std::int64_t patch_size);

/// What the parts of an encoder block are called in a published model.
struct PublishedBlockNames {
  std::string layers;  ///< before the part, with "*" for the number: "vit.encoder.layer.*."
  std::string attention_norm, query, key, value, attention_output, mlp_norm, hidden, output;
};
/// The rows of blocks whose names have this prefix before "block0".
std::vector<PublishedRow> published_block_rows(const std::string& name_prefix,
                                               const PublishedBlockNames& names);

/// Reads or writes the keys of an EncoderConfig that BERT and ViT share; dropout where it is
/// absent.
void exchange_encoder(ConfigFile& file, EncoderConfig& config, double dropout_if_absent);

}  // namespace headroom
