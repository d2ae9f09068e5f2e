#pragma once

#include <headroom/ops/transformer.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace headroom {

/// A stage whose linear layers can have adapters.
class AdaptableStage {
 public:
  virtual ~AdaptableStage() = default;

  struct Layer {
    at::Tensor weight;               ///< (out, in), of the stage's module
    std::vector<LowRank>* adapters;  ///< of the layer, to be changed
  };
  virtual std::vector<Layer> adaptable_layers() = 0;

  /// For all adapters of the stage; dropout happens while the stage's module trains.
  virtual void set_adapter_factors(double scale, double dropout_p) = 0;
  virtual double adapter_scale() const = 0;
};

}  // namespace headroom
