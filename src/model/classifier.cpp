#include "model/classifier.h"

#include "model/transformer_parts.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/rows_at.h"

namespace headroom {
namespace {

class ScoreHead final : public Stage {
 public:
  explicit ScoreHead(const ScoreHeadOptions& options)
      : Stage("head"),
        options_(options),
        norm_(module_->add(options.norm_name, make_norm(options.width, options.has_norm_bias))),
        score_(module_->add("score", make_linear(options.width, options.num_labels,
                                                 kInitialDeviation, /*bias=*/false))) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch& micro,
                                  int /*option*/) override {
    const at::Tensor last = rows_at(inputs.at(0), micro.targets.at(1));  // (B, C)
    const at::Tensor normed = norm(options_.has_rms_norm ? NormKind::kRms : NormKind::kLayer, last,
                                   norm_->weight, norm_->bias, options_.norm_eps);
    return classifier_results(linear(normed, score_->weight, at::Tensor()), micro,
                              module_->is_training());
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }
  bool runs_without_memory() const override { return true; }

 private:
  ScoreHeadOptions options_;
  std::shared_ptr<GroupModule> module_ = std::make_shared<GroupModule>();
  Weights norm_, score_;
};

}  // namespace

std::vector<at::Tensor> classifier_results(const at::Tensor& scores, const MicroBatch& micro,
                                           bool is_training) {
  std::vector<at::Tensor> results{summed_cross_entropy({scores}, micro)};
  if (is_training) return results;
  results.push_back(count_correct({scores}, micro));
  results.push_back(scores.argmax(1));
  return results;
}

std::shared_ptr<Stage> make_score_head(const ScoreHeadOptions& options) {
  return std::make_shared<ScoreHead>(options);
}

}  // namespace headroom
