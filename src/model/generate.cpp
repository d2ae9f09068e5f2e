#include <headroom/model/generate.h>

#include <headroom/core/error.h>

#include "model/decoder.h"
#include "model/transformer_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <random>

namespace headroom {
namespace {

std::int64_t draw_token(const at::Tensor& scores, const GenerateOptions& options,
                        std::mt19937_64& random) {
  if (options.temperature == 0.0) return scores.argmax().item<std::int64_t>();
  at::Tensor scaled = scores.to(at::kDouble) / options.temperature;
  if (options.top_k > 0 && options.top_k < scaled.numel()) {
    const at::Tensor least = std::get<0>(scaled.topk(options.top_k)).min();
    scaled = scaled.masked_fill(scaled < least, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor cumulative = scaled.softmax(0).cumsum(0).contiguous();
  const double* sums = cumulative.data_ptr<double>();
  const double u = std::uniform_real_distribution<double>()(random) * sums[cumulative.numel() - 1];
  const double* found = std::upper_bound(sums, sums + cumulative.numel(), u);
  return std::min<std::int64_t>(found - sums, cumulative.numel() - 1);
}

// The stages of a language model, by what they do. Members are null when the chain is none.
struct Decoder {
  explicit Decoder(const Chain& chain) {
    if (chain.size() < 2) return;
    embedding = dynamic_cast<const DecoderEmbedding*>(&chain.stage(0));
    head = dynamic_cast<const DecoderHead*>(&chain.stage(chain.size() - 1));
    for (std::size_t i = 1; i + 1 < chain.size(); ++i) {
      const auto* block = dynamic_cast<const BlockStage*>(&chain.stage(i));
      if (block == nullptr || !block->can_decode()) head = nullptr;
      blocks.push_back(block);
    }
  }
  bool is_whole() const { return embedding != nullptr && head != nullptr; }

  const DecoderEmbedding* embedding = nullptr;
  const DecoderHead* head = nullptr;
  std::vector<const BlockStage*> blocks;
};

// Scores of the next token of a growing text.
class Continuation {
 public:
  Continuation(const Decoder& decoder, std::int64_t most_tokens, bool use_cache)
      : decoder_(decoder), use_cache_(use_cache) {
    const std::int64_t capacity = std::min(most_tokens, decoder.embedding->num_positions());
    for (const BlockStage* block : decoder.blocks) caches_.push_back(block->make_cache(capacity));
  }

  at::Tensor next_scores(const std::vector<std::int64_t>& tokens) {
    const auto count = static_cast<std::int64_t>(tokens.size());
    // Positions are counted from the first token that is seen: when that moves on, all have moved.
    const std::int64_t start =
        std::max<std::int64_t>(0, count - decoder_.embedding->num_positions());
    if (!use_cache_ || start != start_) num_seen_ = start;
    start_ = start;
    for (KeyValueCache& cache : caches_) cache.length = num_seen_ - start;
    const at::Tensor fresh =
        torch::tensor(std::vector<std::int64_t>(tokens.begin() + num_seen_, tokens.end()),
                      torch::kLong)
            .unsqueeze(0);  // (1, T)
    at::Tensor x = decoder_.embedding->embed(fresh, num_seen_ - start);
    for (std::size_t i = 0; i < caches_.size(); ++i) x = decoder_.blocks[i]->decode(x, caches_[i]);
    num_seen_ = count;
    return decoder_.head->next_scores(x).cpu();
  }

 private:
  const Decoder& decoder_;
  bool use_cache_;
  std::vector<KeyValueCache> caches_;
  std::int64_t start_ = 0, num_seen_ = 0;  // tokens [start_, num_seen_) are in the caches
};

class EvaluationMode {
 public:
  explicit EvaluationMode(const Chain& chain)
      : chain_(chain), was_training_(chain.stage(0).module()->is_training()) {
    chain_.train(false);
  }
  ~EvaluationMode() { chain_.train(was_training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  const Chain& chain_;
  bool was_training_;
};

void check(const std::vector<std::int64_t>& prompt, const GenerateOptions& options) {
  if (prompt.empty()) throw ConfigError("generate needs at least one token to start from");
  if (options.num_tokens < 0)
    throw ConfigError(fmt::format("{} tokens cannot be generated", options.num_tokens));
  if (!(options.temperature >= 0.0))
    throw ConfigError(fmt::format("temperature {} is not a number from 0 up", options.temperature));
  if (options.top_k < 0)
    throw ConfigError(fmt::format("top_k {} is not a number from 0 up", options.top_k));
}

}  // namespace

bool can_generate(const Chain& chain) { return Decoder(chain).is_whole(); }

std::vector<std::int64_t> generate(const Chain& chain, const std::vector<std::int64_t>& prompt,
                                   const GenerateOptions& options) {
  const Decoder decoder(chain);
  if (!decoder.is_whole())
    throw ConfigError("this model cannot continue text: give a GPT or a Llama of the zoo");
  check(prompt, options);
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(chain);
  std::mt19937_64 random(options.seed);
  std::vector<std::int64_t> tokens = prompt;
  Continuation text(decoder, static_cast<std::int64_t>(prompt.size()) + options.num_tokens,
                    options.use_cache);
  for (std::int64_t i = 0; i < options.num_tokens; ++i) {
    tokens.push_back(draw_token(text.next_scores(tokens), options, random));
    if (options.on_token) options.on_token(tokens.back());
    if (tokens.back() == options.stop_token) break;
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace headroom
