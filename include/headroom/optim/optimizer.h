#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace headroom {

/// What an optimizer of this project remembers about one parameter.
class LeanParamState : public torch::optim::OptimizerParamState {
 public:
  /// The tensors of this state; those that are not in use are left out.
  virtual std::vector<at::Tensor> tensors() const = 0;
  /// Puts others in their places.
  virtual void set_tensors(const std::vector<at::Tensor>& tensors) = 0;
};

/// A `torch::optim::Optimizer` that updates each parameter in one pass, with no temporaries beyond
/// a tile, and whose state can be allocated before training starts. Code written for LibTorch's
/// optimizers uses it unchanged.
///
/// The fast path is for dense float parameters on the CPU; other types, devices and layouts take a
/// plain LibTorch path with the same formulas, or are refused with a ConfigError where the
/// optimizer says so. Sparse gradients are refused. Results do not depend on the number of threads.
class LeanOptimizer : public torch::optim::Optimizer {
 public:
  /// Groups that have options keep them as they are; `defaults` are for those without.
  LeanOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  LeanOptimizer(std::vector<at::Tensor> parameters,
                std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// As --optim has it.
  virtual const char* name() const = 0;

  /// Updates every parameter that has a gradient. Checks everything and allocates missing state
  /// before it changes the first parameter, so that an error leaves the parameters as they were.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Allocates the state of every parameter that requires a gradient, so that no later step()
  /// allocates. May be called again.
  void prepare_state();

  /// The same for one parameter of group `group`.
  void prepare_state(const at::Tensor& parameter, std::size_t group);
  /// The state tensors of one parameter; none before its state is allocated.
  std::vector<at::Tensor> state_tensors(const at::Tensor& parameter) const;

  /// Updates one parameter of group `group` from its gradient, exactly as step() would. Does
  /// nothing if it has none.
  void step_parameter(at::Tensor& parameter, std::size_t group);

  /// Updates the elements from `begin` to `end` of a contiguous parameter whose state is allocated,
  /// as step_parameter() would, with `pieces` in the place of these elements of its
  /// state_tensors(). The pieces of a parameter are to be given in order; the update is done with
  /// the last. Only for optimizers whose elements know nothing of each other: see
  /// has_independent_elements().
  void step_piece(at::Tensor& parameter, std::size_t group, std::int64_t begin, std::int64_t end,
                  const std::vector<at::Tensor>& pieces);

  /// Bytes of all state tensors that are allocated now.
  std::int64_t state_bytes() const;

  /// All state tensors that are allocated now, in the order of groups and parameters.
  std::vector<at::Tensor> state_tensors() const;

  /// Writes options and state of every group by position (never by address: equal runs give equal
  /// archives).
  void save(torch::serialize::OutputArchive& archive) const final;

  /// Restores options and state exactly. Throws SnapshotError, before anything is changed, if the
  /// archive belongs to another optimizer or to parameters of other number, sizes or types.
  void load(torch::serialize::InputArchive& archive) final;

 protected:
  /// Throws ConfigError on options that cannot be served. Constructors call check_all_options().
  virtual void check_options(const torch::optim::OptimizerOptions& options) const = 0;
  void check_all_options() const;

  /// Zeroed state for a parameter of the sizes, strides, type and device of `like`, which may be on
  /// the meta device.
  virtual std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<LeanParamState> make_empty_state() const = 0;

  /// Allocates what options that were changed in mid-training ask for in addition. The default adds
  /// nothing.
  virtual void complete_state(const at::Tensor& like, LeanParamState& state,
                              const torch::optim::OptimizerOptions& options) const;

  /// Throws ConfigError if this parameter cannot be updated. The default accepts all.
  virtual void check_parameter(const at::Tensor& parameter) const;

  virtual void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
                      const torch::optim::OptimizerOptions& options) const = 0;

 private:
  LeanParamState* find_state(const at::Tensor& parameter) const;
  LeanParamState& reserve_state(const at::Tensor& parameter,
                                const torch::optim::OptimizerOptions& options);
  void check_gradient(const at::Tensor& parameter) const;
};

namespace optim_detail {

inline void write_field(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& value) {
  if (value.defined()) archive.write(name, value, /*is_buffer=*/true);
}
inline void read_field(torch::serialize::InputArchive& archive, const char* name,
                       at::Tensor& value) {
  value = at::Tensor();
  archive.try_read(name, value, /*is_buffer=*/true);
}

template <typename Number>
void write_field(torch::serialize::OutputArchive& archive, const char* name, const Number& value) {
  archive.write(name, c10::IValue(value));
}
template <typename Number>
void read_field(torch::serialize::InputArchive& archive, const char* name, Number& value) {
  c10::IValue read;
  archive.read(name, read);
  value = read.to<Number>();
}

inline void write_field(torch::serialize::OutputArchive& archive, const char* name,
                        const std::tuple<double, double>& value) {
  archive.write(std::string(name) + "_0", c10::IValue(std::get<0>(value)));
  archive.write(std::string(name) + "_1", c10::IValue(std::get<1>(value)));
}
inline void read_field(torch::serialize::InputArchive& archive, const char* name,
                       std::tuple<double, double>& value) {
  c10::IValue first;
  c10::IValue second;
  archive.read(std::string(name) + "_0", first);
  archive.read(std::string(name) + "_1", second);
  value = {first.toDouble(), second.toDouble()};
}

/// Learning rate and serialisation of options whose `each_field(options, visit)` calls visit(name,
/// field) for every field.
template <typename Derived>
class LeanOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    Derived::each_field(static_cast<Derived&>(*this),
                        [&](const char* name, auto& field) { read_field(archive, name, field); });
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived::each_field(static_cast<const Derived&>(*this),
                        [&](const char* name, auto& field) { write_field(archive, name, field); });
  }
  double get_lr() const override { return static_cast<const Derived&>(*this).lr(); }
  void set_lr(const double lr) override { static_cast<Derived&>(*this).lr(lr); }
};

/// The same for the state of a parameter.
template <typename Derived>
class LeanParamStateOf : public LeanParamState {
 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Derived::each_field(static_cast<Derived&>(*this),
                        [&](const char* name, auto& field) { read_field(archive, name, field); });
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived::each_field(static_cast<const Derived&>(*this),
                        [&](const char* name, auto& field) { write_field(archive, name, field); });
  }
  std::vector<at::Tensor> tensors() const override {
    std::vector<at::Tensor> found;
    Derived::each_field(static_cast<const Derived&>(*this), [&](const char*, auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
        if (field.defined()) found.push_back(field);
      }
    });
    return found;
  }
  void set_tensors(const std::vector<at::Tensor>& tensors) override {
    std::size_t next = 0;
    Derived::each_field(static_cast<Derived&>(*this), [&](const char*, auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
        if (field.defined()) field = tensors.at(next++);
      }
    });
  }
};

}  // namespace optim_detail

/// Which optimizer, with which numbers, in the words of the command line.
struct OptimizerConfig {
  std::string name = "adamw";  ///< one of optimizer_names()
  double learning_rate = 5e-5;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0;  ///< for those that have one, as sgd
  /// Whether weight decay also applies to parameters of fewer than two dimensions.
  bool decay_biases_and_norms = false;
};

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// Sizes of parameters.
using ParameterShapes = std::vector<std::vector<std::int64_t>>;

/// Tells by name and tensor whether adamw_8bit shall keep fp32 moments for a parameter (customary
/// for embeddings, at 8 bytes each).
using KeepFp32State = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

/// The names that OptimizerConfig may have, in the order of the documentation.
const std::vector<std::string>& optimizer_names();

/// Makes the optimizer that `config` names, for those parameters that require a gradient; a
/// parameter that is listed twice (tied weights) counts once. There are at most two kinds of group,
/// in this order: with weight decay, and without it (biases and norms: fewer than two dimensions).
/// adafactor has a fixed rate and no parameter scaling, as in Hugging Face's trainer. State is
/// allocated by prepare_state() or at the first step. Throws ConfigError on an unknown name,
/// naming the nearest, or numbers out of range.
std::unique_ptr<LeanOptimizer> make_optimizer(const OptimizerConfig& config,
                                              const NamedParameters& parameters,
                                              const KeepFp32State& keep_fp32_state = nullptr);

/// Bytes of state that make_optimizer's choice keeps for float parameters of these sizes, exactly
/// as the meter counts them. Throws ConfigError on an unknown name.
std::int64_t optimizer_state_bytes(const OptimizerConfig& config, const ParameterShapes& shapes);

/// Whether each element is updated from its own gradient and state alone, by the optimizer that is
/// named: a parameter can be updated piece by piece. Throws ConfigError on an unknown name.
bool has_independent_elements(const std::string& name);

/// The Euclidean norm of all gradients taken together, summed in double and in an order that does
/// not depend on the number of threads. Not finite if and only if a gradient is not. Undefined
/// gradients are left out; sparse ones are supported. On the CPU it allocates next to nothing.
double global_norm(const std::vector<at::Tensor>& gradients);

/// The sum of the squares of one gradient, so that it need not stay for the norm of all; `scaled`
/// is the same of the values times 2^-600, for those whose squares overflow.
struct SquareSum {
  double plain = 0;
  double scaled = 0;
};
SquareSum square_sum(const at::Tensor& gradient);
/// Bit by bit the norm that the gradients together have, in this order.
double norm_of(const std::vector<SquareSum>& sums);

/// What gradients of this norm are multiplied with so that it becomes at most max_norm: min(1,
/// max_norm / (norm + 1e-6)), as in PyTorch. 1 when max_norm <= 0 (no clipping) or the norm is not
/// finite. Throws ConfigError when max_norm is not a number.
double clip_factor(double norm, double max_norm);

/// Scales the gradients in place so that their global norm is at most max_norm, and returns the
/// norm before. Call it once per update, on averaged (and unscaled) gradients. When the norm is not
/// finite nothing is changed: the caller skips the update.
double clip_global_norm(const std::vector<at::Tensor>& gradients, double max_norm);

/// The name of the first gradient that has a NaN or an infinity.
std::optional<std::string> first_non_finite(
    const std::vector<std::pair<std::string, at::Tensor>>& named_gradients);

}  // namespace headroom
