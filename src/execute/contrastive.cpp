#include <headroom/execute/contrastive.h>

#include <headroom/comm/communicator.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/optim/optimizer.h>
#include "core/log.h"

#include "execute/non_finite.h"
#include "execute/optimizer_parameters.h"
#include "execute/training_kernels.h"

#include <fmt/format.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <map>

namespace headroom {
namespace {

[[noreturn]] void fail(const std::string& message) { throw Error(ExitCode::kInternal, message); }

std::vector<at::Tensor> checked_embeddings(std::vector<at::Tensor> embeddings,
                                           const MicroBatch& micro) {
  if (embeddings.empty()) throw ConfigError("the embedding function returned no tensor");
  for (const at::Tensor& embedding : embeddings) {
    if (!embedding.defined() || embedding.dim() == 0 || embedding.size(0) != micro.num_samples) {
      throw ConfigError(
          fmt::format("the embedding function returned a tensor whose dimension 0 is not the {} "
                      "samples of the micro-batch",
                      micro.num_samples));
    }
  }
  return embeddings;
}

}  // namespace

// The embeddings of one global batch, and what is needed to make each of them again.
class ContrastiveAccumulator::Window {
 public:
  Window(const std::vector<MicroBatch>& micros, const Embed& embed, Communicator* communicator)
      : micros_(micros), embed_(embed), communicator_(communicator) {
    if (micros_.empty()) throw ConfigError("there is no micro-batch to train on");
    embed_all();
    gather_over_ranks();
  }

  std::int64_t num_samples() const { return all_.front().size(0); }

  // The loss of the batch. Leaves its gradient with respect to the embeddings here, and that of its
  // own parameters in their .grad: on one rank alone, because every rank computes the same one.
  double run_loss(const Loss& loss_of) {
    for (at::Tensor& embeddings : all_) embeddings.requires_grad_(embeddings.is_floating_point());
    const at::Tensor loss = loss_of(all_);
    if (!loss.defined() || loss.numel() != 1)
      throw ConfigError("the loss of the embeddings is not one number");
    if (!loss.requires_grad())
      throw ConfigError("the loss does not depend on the embeddings by differentiable operations");
    if (!communicator_ || communicator_->is_first()) {
      loss.backward();
      for (const at::Tensor& embeddings : all_) gradients_.push_back(embeddings.grad());
    } else {
      gradients_ = torch::autograd::grad({loss}, all_, {}, /*retain_graph=*/c10::nullopt,
                                         /*create_graph=*/false, /*allow_unused=*/true);
    }
    return loss.item<double>();
  }

  // Embeds micro-batch `index` again, with the random numbers of the first time, and runs the
  // loss's gradient backward from there.
  void run_backward(std::size_t index) {
    const RandomStateScope same_random_numbers(random_states_[index]);
    const std::vector<at::Tensor> again =
        checked_embeddings(embed_(micros_[index]), micros_[index]);
    std::vector<at::Tensor> roots, seeds;
    for (std::size_t i = 0; i < again.size(); ++i) {
      const std::int64_t begin = first_row_ + starts_[index];
      const std::int64_t end = begin + micros_[index].num_samples;
      if (!torch::equal(again[i].detach(), all_[i].detach().slice(0, begin, end))) {
        fail(fmt::format(
            "embedding micro-batch {} again gave other values than the first time: the embedding "
            "depends on something that is not LibTorch's random state, its inputs or parameters",
            index));
      }
      if (!gradients_[i].defined() || !again[i].requires_grad()) continue;
      roots.push_back(again[i]);
      seeds.push_back(gradients_[i].slice(0, begin, end));
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
  }

 private:
  void embed_all() {
    const torch::NoGradGuard nothing_is_kept;
    const TrainingKernelsScope training_kernels;
    std::vector<std::vector<at::Tensor>> parts;
    std::int64_t num_samples = 0;
    for (const MicroBatch& micro : micros_) {
      starts_.push_back(num_samples);
      num_samples += micro.num_samples;
      random_states_.push_back(RandomState::capture());
      std::vector<at::Tensor> embeddings = checked_embeddings(embed_(micro), micro);
      if (parts.empty()) parts.resize(embeddings.size());
      if (embeddings.size() != parts.size())
        throw ConfigError("the embedding function returned another number of tensors than before");
      for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(embeddings[i].detach());
    }
    for (const std::vector<at::Tensor>& part : parts) all_.push_back(at::cat(part));
  }

  // A sum of tensors that are zero outside of each rank's own rows puts all rows in their places
  // without changing a bit of them.
  void gather_over_ranks() {
    if (!communicator_ || communicator_->size() == 1) return;
    const std::vector<std::string> counts =
        communicator_->gather(std::to_string(all_.front().size(0)));
    std::int64_t num_rows = 0;
    for (std::int64_t rank = 0; rank < communicator_->size(); ++rank) {
      if (rank == communicator_->rank()) first_row_ = num_rows;
      num_rows += std::stoll(counts[static_cast<std::size_t>(rank)]);
    }
    for (at::Tensor& own : all_) {
      std::vector<std::int64_t> sizes = own.sizes().vec();
      sizes[0] = num_rows;
      at::Tensor rows = at::zeros(sizes, own.options());
      rows.slice(0, first_row_, first_row_ + own.size(0)).copy_(own);
      own = rows;
    }
    communicator_->sum(all_);
  }

  const std::vector<MicroBatch>& micros_;
  const Embed& embed_;
  Communicator* communicator_;
  std::vector<RandomState> random_states_;  // before each micro-batch
  std::vector<std::int64_t> starts_;        // first sample of each micro-batch, on this rank
  std::int64_t first_row_ = 0;              // of this rank in all_
  std::vector<at::Tensor> all_;             // of all samples of all ranks
  std::vector<at::Tensor> gradients_;       // of the loss, with respect to all_
};

ContrastiveAccumulator::ContrastiveAccumulator(torch::optim::Optimizer& optimizer,
                                               const torch::nn::Module& model, Embed embed,
                                               Loss loss, ContrastiveOptions options)
    : optimizer_(optimizer), embed_(std::move(embed)), loss_(std::move(loss)), options_(options) {
  clip_factor(0, options_.max_grad_norm);  // throws when it is not a number
  if (const auto name = first_batch_norm(model)) {
    throw ConfigError(fmt::format(
        "'{}' is a BatchNorm in training mode: it normalises each micro-batch by its own "
        "statistics, so that the gradient would not be that of the whole batch; use GroupNorm or "
        "LayerNorm, or set it to evaluation mode",
        *name));
  }
  std::map<const void*, std::string> names;
  for (const auto& item : model.named_parameters())
    names[item.value().unsafeGetTensorImpl()] = item.key();
  for (const at::Tensor& parameter : unique_parameters(optimizer_))
    parameters_.emplace_back(names[parameter.unsafeGetTensorImpl()], parameter);
}

WindowReport ContrastiveAccumulator::update(const std::vector<MicroBatch>& window) {
  try {
    return run(window);
  } catch (...) {
    drop_gradients();
    throw;
  }
}

WindowReport ContrastiveAccumulator::run(const std::vector<MicroBatch>& window) {
  drop_gradients();
  const torch::AutoGradMode with_gradients(true);
  WindowReport report;
  {
    Window batch(window, embed_, options_.communicator);
    report.loss = batch.run_loss(loss_);
    report.items = batch.num_samples();
    report.num_micro_batches = static_cast<std::int64_t>(window.size());
    for (std::size_t i = 0; i < window.size(); ++i) batch.run_backward(i);
  }
  sum_over_ranks();
  apply(report);
  drop_gradients();
  return report;
}

void ContrastiveAccumulator::sum_over_ranks() {
  if (!options_.communicator || options_.communicator->size() == 1) return;
  std::vector<at::Tensor> gradients;
  for (auto& [name, parameter] : parameters_) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter.detach());
    gradients.push_back(parameter.grad());
  }
  const torch::NoGradGuard no_grad;
  options_.communicator->sum(gradients);
}

void ContrastiveAccumulator::apply(WindowReport& report) {
  const auto named = named_gradients();
  if (named.empty()) {
    fail(
        "no parameter of the optimizer received a gradient: it belongs to another model, or the "
        "embeddings are detached from it");
  }
  std::vector<at::Tensor> gradients;
  for (const auto& [name, gradient] : named) gradients.push_back(gradient);
  {
    const torch::NoGradGuard no_grad;
    report.grad_norm = clip_global_norm(gradients, options_.max_grad_norm);
  }
  if (std::isfinite(report.grad_norm)) {
    optimizer_.step();
    ++num_updates_;
    report.updated = true;
    return;
  }
  log_warning(skip_or_throw(options_.non_finite, num_updates_ + num_skipped_updates_ + 1, named,
                            "all parameters together"));
  ++num_skipped_updates_;
}

std::vector<std::pair<std::string, at::Tensor>> ContrastiveAccumulator::named_gradients() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    if (parameter.grad().defined())
      named.emplace_back(describe_parameter(name, i, parameter), parameter.grad());
  }
  return named;
}

void ContrastiveAccumulator::drop_gradients() {
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
}

}  // namespace headroom
