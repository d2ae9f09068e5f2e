#pragma once

// Runs of a chain stage by stage, for the tests of the zoo.

#include <headroom/model/chain.h>

#include "ops/reference_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <vector>

namespace headroom::testing {

/// `num_samples` random texts of tokens below `vocabulary`, each token to be guessed from those
/// before it.
inline MicroBatch random_text(std::int64_t num_samples, std::int64_t length,
                              std::int64_t vocabulary) {
  const at::Tensor text = torch::randint(0, vocabulary, {num_samples, length + 1});
  return {{text.slice(1, 0, length).contiguous()},
          {text.slice(1, 1).contiguous()},
          num_samples,
          num_samples * length};
}

/// The outputs of the last stage, each stage with `option` or the last that it has.
inline std::vector<at::Tensor> run_chain(const Chain& chain, const MicroBatch& micro,
                                         int option = 0) {
  std::vector<at::Tensor> values = micro.inputs;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const int most = static_cast<int>(chain.stage(i).options().size()) - 1;
    values = chain.stage(i).forward(values, micro, std::min(option, most));
  }
  return values;
}

inline at::Tensor loss_of(const Chain& chain, const MicroBatch& micro, int option = 0) {
  return run_chain(chain, micro, option).at(0);
}

/// Every parameter's gradient, which is then cleared.
inline std::vector<at::Tensor> take_gradients(const Chain& chain) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& p : chain.parameters()) {
    gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
    p.mutable_grad() = at::Tensor();
  }
  return gradients;
}

/// Loss and gradients are the same for all options of the blocks, dropout included.
inline void expect_same_bits_for_every_option(const Chain& chain, const MicroBatch& micro) {
  std::vector<at::Tensor> first;
  for (int option = 0; option < 5; ++option) {
    torch::manual_seed(3);
    const at::Tensor loss = loss_of(chain, micro, option);
    loss.backward();
    std::vector<at::Tensor> results = take_gradients(chain);
    results.push_back(loss.detach());
    if (option == 0) first = results;
    EXPECT_TRUE(reference::same_bits(first, results)) << option;
  }
}

}  // namespace headroom::testing
