#include "execute/training_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <utility>

namespace headroom {
namespace {

thread_local bool wants_training_kernels = false;

// oneDNN's LSTM asks the grad mode which of its two kernels to run, and their last bits differ.
// This stands between autograd, which has seen the true mode, and the kernel.
void as_in_training(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode mode(c10::GradMode::is_enabled() || wants_training_kernels);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// LibTorch 1.13 has no such operation, and no difference.
TORCH_LIBRARY_IMPL(aten, ADInplaceOrView, library) {
  library.impl("mkldnn_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&as_in_training>());
}

}  // namespace

TrainingKernelsScope::TrainingKernelsScope()
    : before_(std::exchange(wants_training_kernels, true)) {}

TrainingKernelsScope::~TrainingKernelsScope() { wants_training_kernels = before_; }

}  // namespace headroom
