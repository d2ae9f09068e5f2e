#pragma once

// A model that was cut: its segments, and the model whole.

#include "model/script_adapters.h"
#include "model/script_segment.h"

#include <headroom/model/chain.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom::script {

/// What forward is called with.
struct Signature {
  struct Argument {
    std::string name;
    c10::TypePtr type;
  };
  std::vector<Argument> given;  ///< from the micro-batch, in order: inputs, then targets
  bool takes_targets = false;   ///< the loss is the model's, so that it reads targets too

  /// Throws DataError when the micro-batch has too few tensors.
  torch::jit::Stack arguments(const MicroBatch& micro) const;
};

/// A model whose forward is a graph. Shared by the stages of its chain.
class Program : public WholeModel {
 public:
  Program(Signature signature, Chain::Loss loss)
      : signature_(std::move(signature)), loss_(std::move(loss)) {}

  at::Tensor loss(const MicroBatch& micro) override;

  /// The model run whole; with gradients where they are enabled.
  virtual torch::jit::Stack run_whole(const MicroBatch& micro) = 0;
  /// The same in evaluation mode.
  virtual torch::jit::Stack evaluate(const MicroBatch& micro) = 0;
  /// Whether evaluate() computes in fp32 alone, whatever the precision of training.
  virtual bool evaluates_in_fp32() const { return false; }
  /// The segment of stage `index` for micro-batches of these shapes.
  virtual const Segment& segment(std::size_t index, const MicroBatch& micro) = 0;
  /// Forward for micro-batches of any shape, as it is in training or evaluation; nothing where
  /// there is no such graph.
  virtual std::optional<FlatGraph> flat_graph(bool /*is_training*/) { return std::nullopt; }

  const Signature& signature() const { return signature_; }
  const Chain::Loss& loss_function() const { return loss_; }
  /// Of what the model returned.
  at::Tensor loss_of(const torch::jit::Stack& outputs, const MicroBatch& micro) const;
  /// What the last stage returns: the loss and, where the model is a classifier and evaluated, the
  /// number of right answers.
  std::vector<at::Tensor> results(const torch::jit::Stack& outputs, const MicroBatch& micro,
                                  bool is_training) const;

 private:
  Signature signature_;
  Chain::Loss loss_;
};

/// One stage for each segment between `cuts`. `segments` are those of any shape, for names and
/// state.
Chain make_chain(const std::shared_ptr<Program>& program, const std::vector<Segment>& segments);

/// Which of the legal cuts to make, in order.
using ChooseCuts =
    std::function<std::vector<const Cut*>(const CutGraph& graph, const Signature& signature)>;

/// What forward is called with for a few samples of the example; nothing where it has none.
std::optional<torch::jit::Stack> example_arguments(const Signature& signature,
                                                   const MicroBatch& example);

/// As Chain::from_script does with this example.
ChooseCuts cuts_by(const MicroBatch& example);

/// Chain::from_script with any choice of cuts.
Chain cut_module(torch::jit::Module module, Chain::Loss loss, bool takes_targets,
                 const MicroBatch& example, const ChooseCuts& choose);

/// with_adapters() with any choice of cuts.
Chain cut_with_adapters(const Chain& chain, const std::vector<LayerAdapter>& adapters,
                        const AdapterFactors& factors, const MicroBatch& example,
                        const ChooseCuts& choose);

/// The line that says what is wrong, without the traces around it.
std::string first_line(const std::exception& error);

/// Calls `run`, and turns what an operator throws into a DataError with the shapes of the
/// micro-batch. Memory that runs out is thrown on.
torch::jit::Stack run_on_data(const std::string& what, const MicroBatch& micro,
                              const std::function<torch::jit::Stack()>& run);

}  // namespace headroom::script
