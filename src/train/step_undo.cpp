#include "train/step_undo.h"

#include <torch/torch.h>

namespace headroom {

StepUndo::StepUndo(const std::vector<at::Tensor>& buffers) : buffers_(buffers) {
  for (const at::Tensor& buffer : buffers) {
    const at::Tensor bytes = buffer.contiguous();
    values_.emplace_back(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes());
  }
}

void StepUndo::restore() const {
  random_.restore();
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    std::string bytes = values_[i];
    at::Tensor buffer = buffers_[i];
    buffer.copy_(torch::from_blob(bytes.data(), buffer.sizes(), buffer.options()));
  }
}

}  // namespace headroom
