#pragma once

// What classifiers of the zoo end in.

#include <headroom/model/chain.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// What the last stage of a classifier returns for scores (B, classes): the loss summed over the
/// samples and, when it does not train, the number of right answers and the classes that it chose
/// (B).
std::vector<at::Tensor> classifier_results(const at::Tensor& scores, const MicroBatch& micro,
                                           bool is_training);

/// How a language model that classifies texts ends: the norm of the token by which a text is
/// judged, whose place is micro.targets[1] (B, 1), and a linear layer "score" without bias, as
/// Hugging Face's GPT2ForSequenceClassification and LlamaForSequenceClassification have it.
struct ScoreHeadOptions {
  std::int64_t width = 0;
  std::int64_t num_labels = 0;
  std::string norm_name;  ///< of its parameters: "ln_f"
  bool has_rms_norm = false;
  bool has_norm_bias = true;  ///< of a layer norm
  double norm_eps = 1e-5;
};
std::shared_ptr<Stage> make_score_head(const ScoreHeadOptions& options);

}  // namespace headroom
