#pragma once

#include <headroom/core/error.h>
#include <headroom/core/micro_batch.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
class SequentialImpl;
}  // namespace torch::nn
namespace torch::jit {
struct Module;
}

namespace headroom {

class ModelFormat;

/// A piece of the model with one forward. Stages hand tensors to each other; a skip connection is
/// one more tensor carried along.
class Stage {
 public:
  virtual ~Stage() = default;

  /// Runs the stage. `inputs` is what the stage before returned (for the first stage:
  /// micro.inputs). A stage may read the micro-batch itself (a mask, the targets): it is always in
  /// memory. The last stage returns the loss first: a scalar, *summed* over the items of the
  /// micro-batch; when the module is not training, a classifier adds the number of right answers as
  /// a second tensor. `option` is an index into options(). Options differ in what autograd keeps
  /// and in time, never in values.
  virtual std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                          const MicroBatch& micro, int option) = 0;

  /// Names of the ways to keep what backward needs; the first keeps the most. Every stage has at
  /// least one.
  virtual std::vector<std::string> options() const { return {"keep"}; }

  /// The first option to use when what is kept is rounded to half precision; the leanest that costs
  /// next to no time is a good choice. Options may then differ in what is rounded, and so in
  /// values. Of those from this one on, `num_half_options` do not: see KeptTypeScope.
  virtual int half_option() const { return 0; }
  virtual int num_half_options() const { return 1; }
  /// The first option to use when the stage computes in half precision, where passes over memory
  /// weigh more beside the products. All from this one on are used.
  virtual int half_compute_option() const { return 0; }

  /// Owns the stage's parameters and buffers; null for a stage without any.
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;

  /// Stages of the same kind and the same input shapes cost the same, so that one of them is
  /// measured for all. Empty: not shared.
  virtual std::string kind() const { return {}; }

  /// True when forward runs on tensors of the meta device too, which have shapes but no memory, and
  /// then makes the same allocations: it reads no value and no address of a tensor, and all tensors
  /// that it uses are inputs or belong to the module.
  virtual bool runs_without_memory() const { return false; }

  /// True when the loss compares the samples of a micro-batch with each other (a contrastive one),
  /// so that it is not the sum over parts of the batch: such a batch is never split, and memory is
  /// saved by recomputing alone.
  virtual bool couples_samples() const { return false; }

  /// True when what forward computes depends on buffers that a forward writes, so that a recompute
  /// has to start from the values that the first forward found.
  virtual bool depends_on_buffers() const { return false; }

  /// What stands before the names of the module's parameters and buffers to make them unique in the
  /// chain.
  virtual std::string parameter_prefix() const { return name_ + "."; }

  const std::string& name() const { return name_; }

 protected:
  explicit Stage(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

/// The model that a chain was cut from, over the same parameters and buffers.
class WholeModel {
 public:
  virtual ~WholeModel() = default;
  /// The loss of the model run whole, as its author wrote it, summed over the items: with a graph
  /// for backward where gradients are enabled.
  virtual at::Tensor loss(const MicroBatch& micro) = 0;
  /// The name of the file that save() writes; empty when the model has no file of its own.
  virtual std::string file_name() const = 0;
  /// Writes the model with its present parameters and buffers; the file appears whole or not at
  /// all. Throws DataError when it cannot be written.
  virtual void save(const std::string& path) const = 0;
};

/// What a model that somebody else wrote is trained on, by its outputs and the micro-batch's
/// targets. Tensors of tuples, lists and dictionaries count as outputs in their order.
enum class LossKind {
  kCrossEntropy,   ///< of outputs[0]: class scores in dimension 1, or in the last one
  kMse,            ///< of outputs[0], averaged over the elements of a sample
  kBceWithLogits,  ///< of outputs[0], averaged over the elements of a sample
  kModel,          ///< the model reads inputs and targets, and returns the loss: one number is the
                   ///< mean over the items, several are one for each
};

/// A network as stages in order, the loss being part of the last. Copies share the stages.
class Chain {
 public:
  /// What a stage made from a function runs.
  using Forward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs,
                                                        const MicroBatch& micro)>;
  /// Gives the loss, summed over the items, of what the model returned.
  using Loss =
      std::function<at::Tensor(const std::vector<at::Tensor>& outputs, const MicroBatch& micro)>;

  Chain() = default;

  /// Cuts the forward of a TorchScript module (torch.jit.script or torch.jit.trace, in training
  /// mode) into a chain. The chain trains the module's own tensors. Every stage gives bit by bit
  /// what the whole module gives: check_whole_model() of execute tells. A micro-batch gives forward
  /// its arguments in order; those that it has no tensor for have their defaults.
  /// `example`: a few samples, so that the cuts can be placed by the bytes that cross them; without
  /// one, operations are counted. A TorchScript file is a program: open only files that you trust.
  /// Throws DataError for a file that is no TorchScript, and ConfigError for a model that cannot be
  /// trained or cut.
  static Chain from_script(const std::string& path, LossKind loss, const MicroBatch& example = {});
  static Chain from_script(const torch::jit::Module& module, LossKind loss,
                           const MicroBatch& example = {});
  static Chain from_script(const std::string& path, Loss loss, const MicroBatch& example = {});
  static Chain from_script(const torch::jit::Module& module, Loss loss,
                           const MicroBatch& example = {});

  /// Traces a function of one or more tensors over the parameters and buffers of `module`, and cuts
  /// it like a TorchScript module. It is traced again for every shape of micro-batch.
  static Chain from_function(std::shared_ptr<torch::nn::Module> module, Forward forward,
                             const std::vector<at::Tensor>& example, Loss loss);
  /// The same for a module (torch::nn::Linear, or a pointer to a module) whose forward takes
  /// `example`: one to three tensors.
  template <typename Module>
  static Chain from_module(Module module, const std::vector<at::Tensor>& example, Loss loss);

  /// One stage per child of the Sequential, and the loss as part of the last child's stage.
  /// `runs_without_memory` is what the stages say of themselves.
  static Chain from_sequential(const std::shared_ptr<torch::nn::SequentialImpl>& sequential,
                               Loss loss, bool runs_without_memory = false);

  /// Adds a stage. Names must be unique: throws ConfigError otherwise.
  Chain& add(std::shared_ptr<Stage> stage);
  /// Adds a stage made from a function; `module` owns the parameters that it uses and may be null.
  Chain& add(std::string name, std::shared_ptr<torch::nn::Module> module, Forward forward);

  /// The model that the chain was cut from; null for stages that were written as such.
  const std::shared_ptr<WholeModel>& whole() const { return whole_; }
  void set_whole(std::shared_ptr<WholeModel> whole) { whole_ = std::move(whole); }

  std::size_t size() const { return stages_.size(); }
  Stage& stage(std::size_t index) const { return *stages_[index]; }

  /// Parameters that require grad, in stage order, each once (tied ones too), with names such as
  /// "block3.attn.weight".
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  std::vector<at::Tensor> parameters() const;
  /// Buffers (BatchNorm's statistics, say), in stage order, each once.
  std::vector<std::pair<std::string, at::Tensor>> named_buffers() const;
  /// All that a saved model holds: parameters, whether they require grad or not, then buffers.
  std::vector<std::pair<std::string, at::Tensor>> named_tensors() const;
  std::int64_t num_parameters() const;
  /// True when every stage does.
  bool runs_without_memory() const;
  /// True when a stage does.
  bool couples_samples() const;

  /// Sets training or evaluation mode of every stage.
  void train(bool on = true) const;

  /// How save_pretrained keeps the model; null: under the names of the chain.
  const std::shared_ptr<const ModelFormat>& format() const { return format_; }
  void set_format(std::shared_ptr<const ModelFormat> format) { format_ = std::move(format); }

 private:
  std::vector<std::shared_ptr<Stage>> stages_;
  std::shared_ptr<const ModelFormat> format_;
  std::shared_ptr<WholeModel> whole_;
};

/// The loss of a kind but kModel, which needs the model: throws ConfigError then.
Chain::Loss make_loss(LossKind kind);

/// Every name of a loss, as --loss takes them, and the kind of one. Throws ConfigError, naming the
/// nearest, for another.
std::vector<std::string> loss_names();
LossKind parse_loss(const std::string& name);

/// Cross-entropy summed over the samples, for classifiers: outputs[0] (B, classes),
/// micro.targets[0] (B).
at::Tensor summed_cross_entropy(const std::vector<at::Tensor>& outputs, const MicroBatch& micro);

/// How many samples have their greatest score at the target, as a scalar of int64; undefined when
/// the outputs are no class scores.
at::Tensor count_correct(const std::vector<at::Tensor>& outputs, const MicroBatch& micro);

namespace detail {

template <typename Result, typename Module, typename... T>
struct HasForward : std::false_type {};
template <typename Module, typename... T>
struct HasForward<
    std::void_t<decltype(at::Tensor(std::declval<Module&>()->forward(std::declval<T>()...)))>,
    Module, T...> : std::true_type {};

}  // namespace detail

template <typename Module>
Chain Chain::from_module(Module module, const std::vector<at::Tensor>& example, Loss loss) {
  using T = const at::Tensor&;
  std::shared_ptr<torch::nn::Module> owner;
  if constexpr (std::is_convertible_v<Module, std::shared_ptr<torch::nn::Module>>)
    owner = module;
  else
    owner = module.ptr();
  auto forward = [module](const std::vector<at::Tensor>& x,
                          const MicroBatch&) mutable -> std::vector<at::Tensor> {
    if constexpr (detail::HasForward<void, Module, T>::value)
      if (x.size() == 1) return {module->forward(x[0])};
    if constexpr (detail::HasForward<void, Module, T, T>::value)
      if (x.size() == 2) return {module->forward(x[0], x[1])};
    if constexpr (detail::HasForward<void, Module, T, T, T>::value)
      if (x.size() == 3) return {module->forward(x[0], x[1], x[2])};
    throw ConfigError(
        "the module's forward does not take as many tensors as the example has: give "
        "Chain::from_function a function that calls it");
  };
  return from_function(std::move(owner), std::move(forward), example, std::move(loss));
}

/// For a last stage to derive from, beside Stage, that couples samples (Stage::couples_samples) and
/// whose forward depends on nothing but its inputs (dimension 0 of each is the sample), its
/// parameters and micro.num_samples: a loss over embeddings. A global batch can then be split all
/// the same; docs/contrastive.md says how.
class EmbeddingLoss {
 public:
  virtual ~EmbeddingLoss() = default;
};

/// True when the last stage, and no other, couples samples, and is an EmbeddingLoss.
bool compares_embeddings(const Chain& chain);

}  // namespace headroom
