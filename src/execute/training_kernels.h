#pragma once

namespace headroom {

/// While the scope lives, operations of this thread whose kernel depends on whether gradients are
/// wanted run the kernel of training, also without gradients: a forward that keeps nothing must
/// give the bits of the one that is repeated for backward. No graph is made, and nothing is kept.
class TrainingKernelsScope {
 public:
  TrainingKernelsScope();
  ~TrainingKernelsScope();
  TrainingKernelsScope(const TrainingKernelsScope&) = delete;
  TrainingKernelsScope& operator=(const TrainingKernelsScope&) = delete;

 private:
  bool before_;
};

}  // namespace headroom
