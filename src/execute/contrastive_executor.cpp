#include "execute/contrastive_executor.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/chain.h>
#include "memory/device_clock.h"
#include "memory/shape_meter.h"

#include "core/tensor_storage.h"
#include "execute/stage_run.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>
#include <utility>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradients of the embeddings of one micro-batch, and their values as they were embedded first.
struct Share {
  Tensors gradients;  // rows of those of all samples
  std::uint64_t fingerprint = 0;
};

// In place of a loss: backward starts from gradients that are known.
struct HandOutFunction : torch::autograd::Function<HandOutFunction> {
  static at::Tensor forward(AutogradContext* context, at::TensorList embeddings,
                            const Share* share) {
    context->saved_data["share"] = reinterpret_cast<std::int64_t>(share);
    return at::zeros({}, embeddings[0].options().dtype(at::kFloat));
  }

  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    const auto* share = reinterpret_cast<const Share*>(context->saved_data["share"].toInt());
    variable_list result;
    for (const at::Tensor& gradient : share->gradients)
      result.push_back(gradient.defined() ? gradient.clone() : gradient);
    result.emplace_back();  // of the pointer
    return result;
  }
};

// Half precision turns into fp32 without a change of value, so that a stage reads what was hashed.
std::uint64_t fingerprint_as_read(Tensors embeddings) {
  for (at::Tensor& embedding : embeddings) {
    if (embedding.is_floating_point()) embedding = embedding.to(at::kFloat);
  }
  return fingerprint(embeddings);
}

StageCall loss_call(const Chain& chain, const MicroBatch& micro, const ExecutorOptions& options) {
  return {chain.stage(chain.size() - 1),
          micro,
          /*is_first=*/false,
          /*is_last=*/true,
          /*wants_input_gradient=*/first_trained_stage(chain) + 1 < chain.size(),
          options.keep_in_half,
          options.compute_in_half};
}

std::vector<at::Tensor> parameters_of_loss(const Chain& chain) {
  const auto module = chain.stage(chain.size() - 1).module();
  return module ? module->parameters() : std::vector<at::Tensor>{};
}

struct LossRun {
  at::Tensor loss;
  Tensors gradients;  // with respect to the embeddings
};

LossRun run_loss_of(const Chain& chain, const ExecutorOptions& options, Tensors& embeddings,
                    double scale) {
  const OwnerScope owner(Owner::kActivations);
  MicroBatch window;
  window.num_samples = window.num_items = embeddings.at(0).size(0);
  LossRun run;
  KeptStage kept = [&] {
    const PhaseScope phase(Phase::kForward);
    return forward_keeping(loss_call(chain, window, options), embeddings, 0);
  }();
  embeddings.clear();
  const PhaseScope phase(Phase::kBackward);
  run.loss = kept.outputs.at(0);
  Tensors seed = loss_gradient(kept, scale);
  run.gradients = backward_through(std::move(kept), std::move(seed));
  for (const at::Tensor& parameter : parameters_of_loss(chain)) {
    if (parameter.grad().defined())
      MemoryMeter::instance().assign_owner(parameter.grad(), Owner::kGradients);
  }
  return run;
}

// While it lives, the loss's own parameters have no gradient; afterwards they have the one that
// they had before.
class GradientsOfLossAside {
 public:
  explicit GradientsOfLossAside(const Chain& chain) : parameters_(parameters_of_loss(chain)) {
    for (at::Tensor& parameter : parameters_)
      gradients_.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
  ~GradientsOfLossAside() {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].mutable_grad() = std::move(gradients_[i]);
  }
  GradientsOfLossAside(const GradientsOfLossAside&) = delete;
  GradientsOfLossAside& operator=(const GradientsOfLossAside&) = delete;

 private:
  Tensors parameters_, gradients_;
};

at::Tensor room_like(const at::Tensor& embedding, std::int64_t num_samples) {
  std::vector<std::int64_t> sizes = embedding.sizes().vec();
  sizes.at(0) = num_samples;
  return at::zeros(sizes, embedding.options());
}

template <typename Meter>
ContrastiveLossCosts measure_by(Meter& meter, const Chain& chain, const ExecutorOptions& options,
                                const Tensors& like, std::int64_t num_samples) {
  ContrastiveLossCosts costs;
  const std::int64_t before_bytes = meter.live_bytes();
  Tensors embeddings;
  for (const at::Tensor& embedding : like)
    embeddings.push_back(room_like(embedding, num_samples).fill_(1));
  costs.embedding_bytes = bytes_of(embeddings);
  meter.reset_peak();
  const auto start = DeviceClock::now();
  const LossRun run = run_loss_of(chain, options, embeddings, 1.0);
  costs.ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(DeviceClock::now() - start).count();
  costs.peak_bytes = meter.peak_bytes() - before_bytes;
  costs.gradient_bytes = bytes_of(run.gradients);
  return costs;
}

}  // namespace

// Stands in the place of the chain's last stage.
class ContrastiveExecutor::HandOut final : public Stage {
 public:
  explicit HandOut(const Stage& loss) : Stage(loss.name()), module_(loss.module()) {}

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const MicroBatch& /*micro*/, int /*option*/) override {
    if (fingerprint_as_read(inputs) != share.fingerprint) {
      throw Error(
          ExitCode::kInternal,
          fmt::format("stage '{}' got other embeddings than before the loss: the stages before it "
                      "may depend only on their inputs, their parameters and LibTorch's random "
                      "generators",
                      name()));
    }
    return {HandOutFunction::apply(at::TensorList(inputs), &share)};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }

  Share share;
  Tensors gradients;  // of all samples

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

namespace {

const Chain& checked(const Chain& chain) {
  if (!compares_embeddings(chain)) {
    throw ConfigError(
        "the last stage of the chain does not compare embeddings that earlier stages make");
  }
  return chain;
}

}  // namespace

ContrastiveExecutor::ContrastiveExecutor(const Chain& chain, const ExecutorOptions& options)
    : chain_(checked(chain)),
      options_(options),
      hand_out_(std::make_shared<HandOut>(chain.stage(chain.size() - 1))),
      executor_(chain, options, hand_out_) {}

ContrastiveExecutor::~ContrastiveExecutor() = default;

void ContrastiveExecutor::begin(std::int64_t num_samples, std::int64_t first_sample) {
  clear();
  num_samples_ = num_samples;
  next_row_ = first_sample;
}

void ContrastiveExecutor::embed(const MicroBatch& micro) {
  const PhaseScope phase(Phase::kForward);
  const OwnerScope owner(Owner::kActivations);
  const torch::NoGradGuard no_grad;
  Part part{RandomState::capture(), next_row_, 0};
  const Tensors embeddings = executor_.forward(micro, chain_.size() - 1);
  part.fingerprint = fingerprint_as_read(embeddings);
  make_room_for(embeddings);
  for (std::size_t i = 0; i < embeddings.size(); ++i)
    embeddings_[i].narrow(0, next_row_, micro.num_samples).copy_(embeddings[i]);
  next_row_ += micro.num_samples;
  parts_.push_back(std::move(part));
}

void ContrastiveExecutor::make_room(const MicroBatch& like) {
  const RandomStateScope same_random_state(RandomState::capture());
  make_room_for(executor_.forward(like, chain_.size() - 1));
}

void ContrastiveExecutor::make_room_for(const Tensors& embeddings) {
  if (!embeddings_.empty()) return;
  for (const at::Tensor& embedding : embeddings)
    embeddings_.push_back(room_like(embedding, num_samples_));
}

double ContrastiveExecutor::run_loss(double scale, bool adds_parameters) {
  std::optional<GradientsOfLossAside> not_counted;
  if (!adds_parameters) not_counted.emplace(chain_);
  LossRun run = run_loss_of(chain_, options_, embeddings_, scale);
  hand_out_->gradients = std::move(run.gradients);
  return run.loss.item<double>();
}

MicroResult ContrastiveExecutor::accumulate(const MicroBatch& micro,
                                            const std::vector<Operation>& operations) {
  const Part& part = parts_.at(next_part_++);
  const RandomStateScope same_random_numbers(part.random);
  hand_out_->share = {{}, part.fingerprint};
  for (const at::Tensor& gradient : hand_out_->gradients) {
    hand_out_->share.gradients.push_back(
        gradient.defined() ? gradient.narrow(0, part.first_row, micro.num_samples) : gradient);
  }
  MicroResult result = executor_.accumulate(micro, operations, 1.0);
  // Every stage but the loss ran once more, in embed().
  result.num_forwards += static_cast<std::int64_t>(chain_.size()) - 1;
  result.num_recomputes += static_cast<std::int64_t>(chain_.size()) - 1;
  if (next_part_ == parts_.size()) clear();
  return result;
}

void ContrastiveExecutor::clear() {
  hand_out_->share = {};
  hand_out_->gradients.clear();
  embeddings_.clear();
  parts_.clear();
  next_part_ = 0;
}

ContrastiveLossCosts measure_contrastive_loss(const Chain& chain, const ExecutorOptions& options,
                                              const MicroBatch& micro, std::int64_t num_samples) {
  const RandomStateScope same_random_state(RandomState::capture());
  ExecutorOptions plain = options;
  plain.boundary_formats.clear();
  const Tensors like = Executor(checked(chain), plain).forward(micro, chain.size() - 1);
  const GradientsOfLossAside not_counted(chain);
  try {
    if (!micro.inputs.at(0).is_meta())
      return measure_by(MemoryMeter::instance(), chain, plain, like, num_samples);
    ContrastiveLossCosts costs =
        measure_by(ShapeMeter::instance(), chain, plain, like, num_samples);
    costs.ns = 0;
    return costs;
  } catch (const c10::OutOfMemoryError&) {
    release_failed_backward();
    throw;
  }
}

}  // namespace headroom
