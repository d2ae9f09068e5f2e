#include <headroom/optim/optimizer.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <type_traits>

#include <headroom/core/error.h>

namespace headroom {
namespace {

/// LibTorch keys states by the address of the parameter: as text in 1.13, as a pointer in later
/// versions.
template <typename Key>
Key state_key(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    return fmt::format("{}", fmt::ptr(parameter.unsafeGetTensorImpl()));
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} of sizes [{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

void check_same_tensors(const LeanParamState& expected, const LeanParamState& found,
                        std::size_t group, std::size_t parameter) {
  const auto want = expected.tensors();
  const auto have = found.tensors();
  const auto where =
      fmt::format("the saved optimizer state of parameter {} in group {}", parameter, group);
  if (want.size() != have.size())
    throw SnapshotError(
        fmt::format("{} has {} tensors, expected {}", where, have.size(), want.size()));
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (want[i].sizes() != have[i].sizes() || want[i].scalar_type() != have[i].scalar_type()) {
      throw SnapshotError(fmt::format("{} is {}, expected {}: it belongs to another model", where,
                                      describe(have[i]), describe(want[i])));
    }
  }
}

at::Tensor meta_like(const at::Tensor& parameter) {
  return at::empty_strided(parameter.sizes(), parameter.strides(),
                           parameter.options().device(at::kMeta).requires_grad(false));
}

}  // namespace

LeanOptimizer::LeanOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                             std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)) {
  for (const auto& group : param_groups) add_param_group(group);
}

LeanOptimizer::LeanOptimizer(std::vector<at::Tensor> parameters,
                             std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : LeanOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                    std::move(defaults)) {}

void LeanOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  Optimizer::add_param_group(param_group);
  // LibTorch 2.14 merges a group's options with the defaults if it knows their type, and puts the
  // defaults in the place of any other, ours among them.
  if (param_group.has_options()) param_groups_.back().set_options(param_group.options().clone());
}

torch::Tensor LeanOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  torch::NoGradGuard no_grad;
  check_all_options();
  for (auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_gradient(parameter);
      reserve_state(parameter, group.options());
    }
  }
  for (auto& group : param_groups_) {
    for (auto& parameter : group.params()) {
      if (parameter.grad().defined())
        update(parameter, parameter.grad(), *find_state(parameter), group.options());
    }
  }
  return loss;
}

void LeanOptimizer::prepare_state() {
  torch::NoGradGuard no_grad;
  check_all_options();
  for (auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      if (parameter.requires_grad()) reserve_state(parameter, group.options());
    }
  }
}

void LeanOptimizer::prepare_state(const at::Tensor& parameter, std::size_t group) {
  torch::NoGradGuard no_grad;
  reserve_state(parameter, param_groups_.at(group).options());
}

std::vector<at::Tensor> LeanOptimizer::state_tensors(const at::Tensor& parameter) const {
  const LeanParamState* state = find_state(parameter);
  return state == nullptr ? std::vector<at::Tensor>{} : state->tensors();
}

void LeanOptimizer::step_parameter(at::Tensor& parameter, std::size_t group) {
  if (!parameter.grad().defined()) return;
  torch::NoGradGuard no_grad;
  const auto& options = param_groups_.at(group).options();
  check_options(options);
  check_gradient(parameter);
  update(parameter, parameter.grad(), reserve_state(parameter, options), options);
}

void LeanOptimizer::step_piece(at::Tensor& parameter, std::size_t group, std::int64_t begin,
                               std::int64_t end, const std::vector<at::Tensor>& pieces) {
  torch::NoGradGuard no_grad;
  const auto& options = param_groups_.at(group).options();
  check_options(options);
  check_gradient(parameter);
  LeanParamState& state = *find_state(parameter);
  // Counts of steps advance with the last piece alone.
  const std::unique_ptr<torch::optim::OptimizerParamState> copy = state.clone();
  auto& state_of_piece = static_cast<LeanParamState&>(*copy);
  state_of_piece.set_tensors(pieces);
  at::Tensor elements = parameter.detach().view({-1}).slice(0, begin, end);
  const at::Tensor gradient = parameter.grad().reshape({-1}).slice(0, begin, end);
  if (end < parameter.numel()) return update(elements, gradient, state_of_piece, options);
  const std::vector<at::Tensor> whole = state.tensors();
  state.set_tensors(pieces);
  update(elements, gradient, state, options);
  state.set_tensors(whole);
}

std::vector<at::Tensor> LeanOptimizer::state_tensors() const {
  std::vector<at::Tensor> all;
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      if (const LeanParamState* state = find_state(parameter)) {
        for (auto& tensor : state->tensors()) all.push_back(std::move(tensor));
      }
    }
  }
  return all;
}

std::int64_t LeanOptimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& tensor : state_tensors()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

void LeanOptimizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write("optimizer", c10::IValue(std::string(name())));
  archive.write("num_groups", c10::IValue(static_cast<std::int64_t>(param_groups_.size())));
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& group = param_groups_[i];
    torch::serialize::OutputArchive group_archive(archive.compilation_unit());
    torch::serialize::OutputArchive options_archive(archive.compilation_unit());
    group.options().serialize(options_archive);
    group_archive.write("options", options_archive);
    group_archive.write("num_parameters",
                        c10::IValue(static_cast<std::int64_t>(group.params().size())));
    for (std::size_t j = 0; j < group.params().size(); ++j) {
      const LeanParamState* state = find_state(group.params()[j]);
      if (state == nullptr) continue;
      torch::serialize::OutputArchive state_archive(archive.compilation_unit());
      state->serialize(state_archive);
      group_archive.write(fmt::format("state_{}", j), state_archive);
    }
    archive.write(fmt::format("group_{}", i), group_archive);
  }
}

void LeanOptimizer::load(torch::serialize::InputArchive& archive) {
  torch::NoGradGuard no_grad;
  c10::IValue value;
  if (!archive.try_read("optimizer", value) || !value.isString() || value.toStringRef() != name()) {
    throw SnapshotError(fmt::format("the saved optimizer is {}, not {}",
                                    value.isString() ? value.toStringRef() : "of another kind",
                                    name()));
  }
  archive.read("num_groups", value);
  if (value.toInt() != static_cast<std::int64_t>(param_groups_.size())) {
    throw SnapshotError(fmt::format("the saved optimizer has {} parameter groups, this one {}",
                                    value.toInt(), param_groups_.size()));
  }
  struct Loaded {
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::vector<std::unique_ptr<LeanParamState>> states;
  };
  std::vector<Loaded> loaded(param_groups_.size());
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& parameters = param_groups_[i].params();
    torch::serialize::InputArchive group_archive;
    torch::serialize::InputArchive options_archive;
    archive.read(fmt::format("group_{}", i), group_archive);
    group_archive.read("options", options_archive);
    loaded[i].options = param_groups_[i].options().clone();
    loaded[i].options->serialize(options_archive);
    group_archive.read("num_parameters", value);
    if (value.toInt() != static_cast<std::int64_t>(parameters.size())) {
      throw SnapshotError(fmt::format("group {} of the saved optimizer has {} parameters, here {}",
                                      i, value.toInt(), parameters.size()));
    }
    loaded[i].states.resize(parameters.size());
    for (std::size_t j = 0; j < parameters.size(); ++j) {
      torch::serialize::InputArchive state_archive;
      if (!group_archive.try_read(fmt::format("state_{}", j), state_archive)) continue;
      loaded[i].states[j] = make_empty_state();
      loaded[i].states[j]->serialize(state_archive);
      check_same_tensors(*make_state(meta_like(parameters[j]), *loaded[i].options),
                         *loaded[i].states[j], i, j);
    }
  }
  using Key = std::decay_t<decltype(state_)>::key_type;
  state_.clear();
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(std::move(loaded[i].options));
    for (std::size_t j = 0; j < loaded[i].states.size(); ++j) {
      if (loaded[i].states[j])
        state_[state_key<Key>(param_groups_[i].params()[j])] = std::move(loaded[i].states[j]);
    }
  }
}

void LeanOptimizer::check_all_options() const {
  for (const auto& group : param_groups_) check_options(group.options());
}

void LeanOptimizer::complete_state(const at::Tensor& /*like*/, LeanParamState& /*state*/,
                                   const torch::optim::OptimizerOptions& /*options*/) const {}

void LeanOptimizer::check_parameter(const at::Tensor& /*parameter*/) const {}

void LeanOptimizer::check_gradient(const at::Tensor& parameter) const {
  if (parameter.grad().layout() != at::kStrided) {
    throw ConfigError(fmt::format(
        "{} takes dense gradients only; switch the sparse gradients of the embedding off", name()));
  }
  check_parameter(parameter);
}

LeanParamState* LeanOptimizer::find_state(const at::Tensor& parameter) const {
  using Key = std::decay_t<decltype(state_)>::key_type;
  const auto found = state_.find(state_key<Key>(parameter));
  return found == state_.end() ? nullptr : static_cast<LeanParamState*>(found->second.get());
}

LeanParamState& LeanOptimizer::reserve_state(const at::Tensor& parameter,
                                             const torch::optim::OptimizerOptions& options) {
  if (LeanParamState* state = find_state(parameter)) {
    complete_state(parameter, *state, options);
    return *state;
  }
  check_parameter(parameter);
  using Key = std::decay_t<decltype(state_)>::key_type;
  auto made = make_state(parameter, options);
  LeanParamState& state = *made;
  state_[state_key<Key>(parameter)] = std::move(made);
  return state;
}

}  // namespace headroom
