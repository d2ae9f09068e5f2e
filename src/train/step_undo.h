#pragma once

#include <headroom/core/random.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace headroom {

/// Random state and buffers of before a step, so that it can be made again. Holds no tensor memory.
/// Parameters are no part of it: they change only in the update itself, after which nothing fails.
class StepUndo {
 public:
  explicit StepUndo(const std::vector<at::Tensor>& buffers);

  void restore() const;

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<std::string> values_;
  RandomState random_ = RandomState::capture();
};

}  // namespace headroom
