#include <headroom/execute/accumulator.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "core/log.h"

#include "execute/non_finite.h"
#include "execute/optimizer_parameters.h"

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace headroom {
namespace {

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

void multiply(const std::vector<at::Tensor>& gradients, double factor) {
  if (factor == 1.0) return;
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
}

/// Differs when the parameter was changed. LibTorch's own optimizers write through .data(), past
/// the version counter: so a few of its elements count too (on the CPU, where reading them is
/// free).
std::uint64_t parameter_fingerprint(const at::Tensor& parameter) {
  constexpr std::uint64_t kPrime = 1099511628211;  // as in FNV-1a
  std::uint64_t hash = parameter._version();
  if (!parameter.is_cpu() || !parameter.is_non_overlapping_and_dense()) return hash;
  constexpr std::int64_t kNumSamples = 4;
  const auto* bytes = static_cast<const unsigned char*>(parameter.data_ptr());
  const std::int64_t size = parameter.numel();
  const std::int64_t stride = std::max<std::int64_t>(1, size / kNumSamples);
  const auto element_size = static_cast<std::int64_t>(parameter.element_size());
  for (std::int64_t element = 0; element < size; element += stride) {
    for (std::int64_t i = 0; i < element_size; ++i)
      hash = (hash ^ bytes[element * element_size + i]) * kPrime;
  }
  return hash;
}

}  // namespace

GradientAccumulator::GradientAccumulator(torch::optim::Optimizer& optimizer,
                                         AccumulationSchedule steps, AccumulatorOptions options)
    : optimizer_(optimizer),
      schedule_(std::move(steps)),
      options_(std::move(options)),
      steps_(schedule_.steps_at(0)) {
  clip_factor(0, options_.max_grad_norm);  // throws when it is not a number
}

GradientAccumulator::GradientAccumulator(torch::optim::Optimizer& optimizer,
                                         AccumulationSchedule steps, const torch::nn::Module& model,
                                         AccumulatorOptions options)
    : GradientAccumulator(optimizer, std::move(steps), std::move(options)) {
  for (const auto& parameter : model.named_parameters())
    names_.emplace(parameter.value().unsafeGetTensorImpl(), parameter.key());
  if (schedule_.max_steps() > 1) warn_about_batch_norm(model);
}

bool GradientAccumulator::backward(const at::Tensor& loss, std::int64_t items) {
  check_usable();
  if (!loss.defined() || loss.numel() != 1) {
    throw ConfigError(
        loss.defined()
            ? fmt::format(
                  "the loss must be one number, not {} of them; average or sum it over its items",
                  loss.numel())
            : std::string("the loss is an undefined tensor"));
  }
  if (items < 0)
    throw ConfigError(fmt::format(
        "a micro-batch with {} items; give the number of samples or tokens that the loss covers",
        items));
  if (num_micro_batches_ == 0) open_window();
  failed_ = true;
  if (items > 0)
    add(loss, items);  // the mean over no items is NaN: it must not reach the gradients
  failed_ = false;
  ++num_micro_batches_;
  return num_micro_batches_ >= steps_ && close_window();
}

bool GradientAccumulator::flush() {
  check_usable();
  return num_micro_batches_ > 0 && close_window();
}

void GradientAccumulator::discard() {
  if (failed_) release_failed_backward();
  drop_gradients();
  reset_window();
}

void GradientAccumulator::start_epoch(std::int64_t epoch) {
  const std::int64_t steps = schedule_.steps_at(epoch);
  if (num_micro_batches_ > 0) {
    throw Error(ExitCode::kInternal,
                fmt::format("epoch {} starts inside a window ({} of {} micro-batches); call "
                            "flush() or discard() at the end of an epoch",
                            epoch, num_micro_batches_, steps_));
  }
  steps_ = steps;
}

void GradientAccumulator::check_usable() const {
  if (failed_)
    throw Error(
        ExitCode::kInternal,
        "an exception left this window of gradient accumulation half done; call discard() first");
}

void GradientAccumulator::open_window() {
  parameters_ = unique_parameters(optimizer_);
  drop_gradients();
  fingerprints_.clear();
  for (const at::Tensor& parameter : parameters_)
    fingerprints_.push_back(parameter_fingerprint(parameter));
  sums_.assign(parameters_.size(), at::Tensor());
}

void GradientAccumulator::add(const at::Tensor& loss, std::int64_t items) {
  if (reference_items_ == 0) reference_items_ = static_cast<double>(items);
  // Weights are relative to the first micro-batch: gradients keep the magnitude of a mean, and
  // equal micro-batches weigh exactly 1.
  const double loss_weight =
      options_.loss_reduction == LossReduction::kMean ? static_cast<double>(items) : 1.0;
  const double weight = loss_weight / reference_items_;
  // The weight goes in as the seed of backward, unless the loss's precision would round it: then it
  // is applied in fp32 afterwards.
  const bool weigh_afterwards = is_half(loss);
  if (weigh_afterwards) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) move_to_sum(i, 1.0);
  }
  const at::Tensor loss_term = loss.detach().reshape({}).to(at::kDouble).mul(loss_weight);
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + loss_term.to(loss_sum_.device()) : loss_term;
  loss.backward(at::full_like(loss, weigh_afterwards ? 1.0 : weight));
  items_ += items;

  check_parameters_unchanged();
  check_gradients_arrived();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (weigh_afterwards || is_half(parameters_[i]))
      move_to_sum(i, weigh_afterwards ? weight : 1.0);
  }
}

void GradientAccumulator::check_parameters_unchanged() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameter_fingerprint(parameters_[i]) != fingerprints_[i]) {
      throw Error(ExitCode::kInternal,
                  fmt::format("{} was changed inside a window of gradient accumulation; only the "
                              "accumulator may step the optimizer, and one that "
                              "steps in backward cannot accumulate",
                              parameter_name(i)));
    }
  }
}

void GradientAccumulator::check_gradients_arrived() {
  if (gradients_arrived_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    gradients_arrived_ = gradients_arrived_ || parameters_[i].grad().defined();
  if (!gradients_arrived_) {
    throw Error(ExitCode::kInternal,
                "no parameter of the optimizer received a gradient: it belongs to another model, "
                "or something frees gradients during backward");
  }
}

/// Adds weight x .grad to the fp32 sum and frees .grad. The first gradient that is not in half
/// precision becomes the sum itself.
void GradientAccumulator::move_to_sum(std::size_t index, double weight) {
  const at::Tensor gradient = parameters_[index].grad();
  if (!gradient.defined()) return;
  const torch::NoGradGuard no_grad;
  if (sums_[index].defined()) {
    sums_[index].add_(gradient, weight);
  } else {
    sums_[index] = is_half(gradient) ? gradient.to(at::kFloat) : gradient;
    if (weight != 1.0) sums_[index].mul_(weight);
  }
  parameters_[index].mutable_grad() = at::Tensor();
}

/// The window's gradients, one per parameter that has one; in the order of the parameters.
std::vector<at::Tensor> GradientAccumulator::gather_gradients() {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (sums_[i].defined()) move_to_sum(i, 1.0);
    if (options_.reduce && !sums_[i].defined() && !parameters_[i].grad().defined()) {
      sums_[i] = at::zeros_like(
          parameters_[i], parameters_[i].options().dtype(
                              is_half(parameters_[i]) ? at::kFloat : parameters_[i].scalar_type()));
    }
    const at::Tensor gradient = sums_[i].defined() ? sums_[i] : parameters_[i].grad();
    if (gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
}

bool GradientAccumulator::close_window() {
  failed_ = true;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients = gather_gradients();
  WindowTotals totals{items_, loss_sum_.defined() ? loss_sum_.item<double>() : 0.0};
  double sum_scale = reference_items_;
  if (options_.reduce) {
    multiply(gradients, sum_scale);
    sum_scale = 1.0;
    options_.reduce(gradients, totals);
  }
  last_window_ = {std::numeric_limits<double>::quiet_NaN(), 0.0, totals.items, num_micro_batches_,
                  false};
  if (totals.items > 0) {
    const double mean_scale = sum_scale / static_cast<double>(totals.items);
    last_window_.loss = totals.loss_sum / static_cast<double>(totals.items);
    last_window_.grad_norm = global_norm(gradients) * mean_scale;
    if (std::isfinite(last_window_.grad_norm)) {
      update(std::move(gradients),
             mean_scale * clip_factor(last_window_.grad_norm, options_.max_grad_norm));
    } else {
      skip(gradients);
    }
  }
  drop_gradients();
  reset_window();
  return last_window_.updated;
}

void GradientAccumulator::update(std::vector<at::Tensor> gradients, double factor) {
  multiply(gradients, factor);
  gradients.clear();  // so that each fp32 sum is freed as soon as it was rounded
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!sums_[i].defined()) continue;
    parameters_[i].mutable_grad() = sums_[i].to(parameters_[i].scalar_type());
    sums_[i] = at::Tensor();
  }
  {
    const torch::AutoGradMode grad_mode(
        true);  // as the optimizer would find it in a loop without an accumulator
    optimizer_.step();
  }
  ++num_updates_;
  last_window_.updated = true;
}

void GradientAccumulator::skip(const std::vector<at::Tensor>& gradients) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (std::size_t i = 0, next = 0; i < parameters_.size(); ++i) {
    if (sums_[i].defined() || parameters_[i].grad().defined())
      named.emplace_back(parameter_name(i), gradients[next++]);
  }
  log_warning(skip_or_throw(options_.non_finite, num_updates_ + num_skipped_updates_ + 1, named,
                            "all parameters together"));
  ++num_skipped_updates_;
}

void GradientAccumulator::drop_gradients() {
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  for (at::Tensor& sum : sums_) sum = at::Tensor();
}

void GradientAccumulator::reset_window() {
  num_micro_batches_ = 0;
  items_ = 0;
  reference_items_ = 0;
  loss_sum_ = at::Tensor();
  failed_ = false;
}

std::string GradientAccumulator::parameter_name(std::size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  return describe_parameter(found != names_.end() ? found->second : "", index, parameter);
}

std::optional<std::string> warn_about_batch_norm(const torch::nn::Module& module,
                                                 const std::string& prefix) {
  std::optional<std::string> name = first_batch_norm(module, prefix);
  if (name) {
    log_warning_once("accumulation.batch_norm",
                     fmt::format("'{}' is a BatchNorm: it normalises each micro-batch by its own "
                                 "statistics, so that accumulation does not equal the "
                                 "large batch here; GroupNorm or LayerNorm do not have this limit",
                                 *name));
  }
  return name;
}

}  // namespace headroom
