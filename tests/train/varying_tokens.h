#pragma once

// Sequences of different lengths, for the tests of layer train.

#include <headroom/data/dataset.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace headroom {

/// Tokens whose length is a function of the sample; a micro-batch is cut to its longest.
class VaryingTokens final : public Dataset {
 public:
  using Length = std::function<std::int64_t(std::int64_t sample)>;
  VaryingTokens(std::shared_ptr<const Dataset> full, Length length)
      : full_(std::move(full)), length_(std::move(length)) {}

  std::int64_t size() const override { return full_->size(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    std::int64_t longest = 0;
    for (const std::int64_t index : indices) longest = std::max(longest, length_(index));
    MicroBatch micro = full_->load(indices);
    micro.inputs[0] = micro.inputs[0].slice(1, 0, longest).contiguous();    // (B, T)
    micro.targets[0] = micro.targets[0].slice(1, 0, longest).contiguous();  // (B, T)
    for (std::size_t i = 0; i < indices.size(); ++i) {
      micro.targets[0][static_cast<std::int64_t>(i)]
          .slice(0, length_(indices[i]), longest)
          .fill_(-100);
    }
    micro.num_items = count_items(indices);
    return micro;
  }

  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    std::int64_t items = 0;
    for (const std::int64_t index : indices) items += length_(index);
    return items;
  }

 private:
  std::shared_ptr<const Dataset> full_;
  Length length_;
};

}  // namespace headroom
