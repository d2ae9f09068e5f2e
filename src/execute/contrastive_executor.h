#pragma once

// A loss that compares all samples of a global batch, carried out in micro-batches.

#include <headroom/core/random.h>
#include <headroom/execute/executor.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace headroom {

/// Carries out plans over a chain whose last stage compares embeddings, one window at a time:
///   1. begin(), then embed() for every micro-batch: nothing is kept but its embeddings;
///   2. run_loss(): the gradient of the loss of all samples with respect to the embeddings;
///   3. accumulate() for every micro-batch, in the same order and with the same random numbers: it
///      runs backward from the gradient of its own embeddings.
/// The gradients are those of the whole batch, up to the order of sums over samples.
class ContrastiveExecutor {
 public:
  /// Throws ConfigError for a chain whose last stage does not compare embeddings.
  ContrastiveExecutor(const Chain& chain, const ExecutorOptions& options);
  ~ContrastiveExecutor();

  /// Starts a window of `num_samples` over all ranks, of which this rank embeds those from
  /// `first_sample` on.
  void begin(std::int64_t num_samples, std::int64_t first_sample);
  /// The next micro-batch of this rank.
  void embed(const MicroBatch& micro);
  /// For a rank without samples: room for the embeddings of the others, shaped as those of `like`.
  void make_room(const MicroBatch& like);
  /// Of all ranks, those of the others being 0: to be summed over the ranks.
  const std::vector<at::Tensor>& embeddings() const { return embeddings_; }

  /// The loss of all samples, summed over the items. Frees the embeddings. The gradient of scale x
  /// loss stays here, that of the loss's own parameters is added to their gradients if
  /// `adds_parameters`: every rank computes the same, and one must count it.
  double run_loss(double scale, bool adds_parameters);

  /// As Executor::accumulate, but for loss and scale, which run_loss() had. Throws Error when the
  /// embeddings are not what they were in embed().
  MicroResult accumulate(const MicroBatch& micro, const std::vector<Operation>& operations);

  /// Frees everything.
  void clear();

  ContrastiveExecutor(const ContrastiveExecutor&) = delete;
  ContrastiveExecutor& operator=(const ContrastiveExecutor&) = delete;

 private:
  class HandOut;

  struct Part {
    RandomState random;         // before the micro-batch
    std::int64_t first_row;     // of its samples in the window
    std::uint64_t fingerprint;  // of its embeddings
  };

  void make_room_for(const std::vector<at::Tensor>& embeddings);

  const Chain& chain_;
  ExecutorOptions options_;
  std::shared_ptr<HandOut> hand_out_;
  Executor executor_;  // over the chain with hand_out_ in place of its last stage

  std::int64_t num_samples_ = 0;
  std::int64_t next_row_ = 0;
  std::size_t next_part_ = 0;
  std::vector<Part> parts_;
  std::vector<at::Tensor> embeddings_;  // of all samples of all ranks
};

/// What the loss of a window takes, beside its micro-batches.
struct ContrastiveLossCosts {
  std::int64_t embedding_bytes = 0;  ///< from the first embed() to run_loss()
  std::int64_t gradient_bytes = 0;   ///< from run_loss() to the last accumulate()
  std::int64_t peak_bytes = 0;       ///< of run_loss(), the embeddings included
  std::int64_t ns = 0;               ///< that run_loss() takes; 0 where it cannot be timed
};

/// Measures the loss of `num_samples` whose embeddings are shaped as those of `micro`; on the meta
/// device bytes are counted. Gradients and random state are left as they were. Throws
/// c10::OutOfMemoryError where it does not fit under the meter's cap.
ContrastiveLossCosts measure_contrastive_loss(const Chain& chain, const ExecutorOptions& options,
                                              const MicroBatch& micro, std::int64_t num_samples);

}  // namespace headroom
