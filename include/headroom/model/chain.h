#pragma once

#include <headroom/core/micro_batch.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
class SequentialImpl;
}  // namespace torch::nn

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

  const std::string& name() const { return name_; }

 protected:
  explicit Stage(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
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

  /// One stage per child of the Sequential, and the loss as part of the last child's stage.
  /// `runs_without_memory` is what the stages say of themselves.
  static Chain from_sequential(const std::shared_ptr<torch::nn::SequentialImpl>& sequential,
                               Loss loss, bool runs_without_memory = false);

  /// Adds a stage. Names must be unique: throws ConfigError otherwise.
  Chain& add(std::shared_ptr<Stage> stage);
  /// Adds a stage made from a function; `module` owns the parameters that it uses and may be null.
  Chain& add(std::string name, std::shared_ptr<torch::nn::Module> module, Forward forward);

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
};

/// Cross-entropy summed over the samples, for classifiers: outputs[0] (B, classes),
/// micro.targets[0] (B).
at::Tensor summed_cross_entropy(const std::vector<at::Tensor>& outputs, const MicroBatch& micro);

/// How many samples have their greatest score at the target, as a scalar of int64; undefined when
/// the outputs are no class scores.
at::Tensor count_correct(const std::vector<at::Tensor>& outputs, const MicroBatch& micro);

}  // namespace headroom
