#pragma once

// Low-rank adapters on the linear layers of a chain that was cut from a TorchScript module.

#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace headroom::script {

/// A matrix that forward multiplies its activations with, by aten::linear, or by a product with the
/// matrix or its transpose.
struct LinearLayer {
  std::string name;  ///< of the parameter, without ".weight": "encoder.0.fc"
  at::Tensor weight;
  bool is_transposed = false;  ///< the weight is (in, out)

  std::int64_t in() const { return weight.size(is_transposed ? 0 : 1); }
  std::int64_t out() const { return weight.size(is_transposed ? 1 : 0); }
};

struct LayerAdapter {
  LinearLayer layer;
  at::Tensor down;  ///< (r, in)
  at::Tensor up;    ///< (out, r)
};

struct AdapterFactors {
  double scale = 1.0;
  double dropout_p = 0.0;  ///< in training
};

/// The layers of a chain that can have adapters, in the order in which forward meets them; none for
/// a chain that was not cut from a TorchScript module. A matrix that forward also uses in another
/// way (tied to an embedding, say) is not among them.
std::vector<LinearLayer> linear_layers(const Chain& chain);

/// The model cut again, with `scale * up(down(dropout(x)))` added to what each layer gives.
/// `example` as for Chain::from_script. The chain's whole model is the graph with the adapters in
/// one piece; what it saves is the module without them.
Chain with_adapters(const Chain& chain, const std::vector<LayerAdapter>& adapters,
                    const AdapterFactors& factors, const MicroBatch& example);

/// Adds to the layer's weight what the adapter adds to its results.
void merge(const LayerAdapter& adapter, double scale);

}  // namespace headroom::script
