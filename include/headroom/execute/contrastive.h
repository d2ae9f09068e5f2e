#pragma once

#include <headroom/core/micro_batch.h>
#include <headroom/execute/accumulator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class Communicator;

struct ContrastiveOptions {
  /// The gradient is clipped to this global norm; 0 means no clipping.
  double max_grad_norm = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kSkip;
  /// Ranks whose samples form one global batch: every embedding is compared with those of all
  /// ranks. Not owned; null means one rank.
  Communicator* communicator = nullptr;
};

/// Trains with a loss that compares the samples of a batch with each other (a contrastive loss) on
/// a global batch of any size, in the memory of one micro-batch and the embeddings of all.
///
///     headroom::ContrastiveAccumulator accumulator(
///         optimizer, model,
///         [&](const headroom::MicroBatch& micro) {
///           return std::vector<at::Tensor>{model->image(micro.inputs[0]),
///                                          model->text(micro.inputs[1])};
///         },
///         [&](const std::vector<at::Tensor>& e) { return clip_loss(e[0], e[1]); });
///     for (const headroom::MicroBatch& batch : batches)
///       accumulator.update(headroom::split(batch, /*max_micro_batch=*/16));
///
/// The gradient is that of the loss of the whole batch, not of a sum over micro-batches:
/// 1. every micro-batch is embedded without keeping activations, and its random state recorded;
/// 2. the loss and its gradient with respect to all embeddings are computed once;
/// 3. every micro-batch is embedded again, with the same random numbers, and that gradient runs
///    backward from its embeddings.
/// So an update costs one more forward than the same batch in one piece.
///
/// Not thread-safe.
class ContrastiveAccumulator {
 public:
  /// Embeds a micro-batch: one or several tensors whose dimension 0 is the sample, the same number
  /// of tensors with the same other sizes for every micro-batch.
  using Embed = std::function<std::vector<at::Tensor>(const MicroBatch& micro)>;
  /// The loss of a batch, one number, of the embeddings of all its samples: tensor i holds tensor i
  /// of every micro-batch, in order; with several ranks, those of rank 0 first. It may use
  /// parameters of its own (a temperature).
  using Loss = std::function<at::Tensor(const std::vector<at::Tensor>& embeddings)>;

  /// `optimizer` must outlive this object. `model` names parameters in messages. Throws ConfigError
  /// when it has BatchNorm in training mode: that normalises by the statistics of a micro-batch, so
  /// that no split gives the gradient of the whole batch.
  ContrastiveAccumulator(torch::optim::Optimizer& optimizer, const torch::nn::Module& model,
                         Embed embed, Loss loss, ContrastiveOptions options = {});

  /// One update from the micro-batches of one global batch (with several ranks: of this rank's
  /// share of it). The report's items are the samples of all ranks. Gradients are freed afterwards.
  /// Throws ConfigError when there is no micro-batch, or what `embed` and `loss` return has the
  /// wrong form; Error when embedding a micro-batch again gives other values than before, when no
  /// parameter receives a gradient, or, with NonFinitePolicy::kError, when the gradient is not
  /// finite. After an exception parameters are unchanged and gradients are freed, unless it came
  /// from the optimizer.
  WindowReport update(const std::vector<MicroBatch>& window);

  std::int64_t num_updates() const { return num_updates_; }
  /// Updates whose gradient was not finite.
  std::int64_t num_skipped_updates() const { return num_skipped_updates_; }

  ContrastiveAccumulator(const ContrastiveAccumulator&) = delete;
  ContrastiveAccumulator& operator=(const ContrastiveAccumulator&) = delete;

 private:
  class Window;

  WindowReport run(const std::vector<MicroBatch>& window);
  void apply(WindowReport& report);
  void sum_over_ranks();
  std::vector<std::pair<std::string, at::Tensor>> named_gradients() const;
  void drop_gradients();

  torch::optim::Optimizer& optimizer_;
  std::vector<std::pair<std::string, at::Tensor>> parameters_;  // of the optimizer, each once
  Embed embed_;
  Loss loss_;
  ContrastiveOptions options_;
  std::int64_t num_updates_ = 0;
  std::int64_t num_skipped_updates_ = 0;
};

}  // namespace headroom
