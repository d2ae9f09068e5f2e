#pragma once

// How often classes were chosen, and rightly, in an evaluation.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

class ClassCounts {
 public:
  /// Chosen and right classes of some samples, (B) int64 each.
  void add(const at::Tensor& chosen, const at::Tensor& right);
  /// What another rank counted, as bytes() of it.
  void add_bytes(const std::string& bytes);
  std::string bytes() const;

  /// Of two classes, the F1 score of the second; of more, its mean over the classes that occur.
  /// Nothing before there is a sample.
  std::optional<double> f1() const;

 private:
  struct Count {
    std::int64_t num_chosen = 0;
    std::int64_t num_right = 0;   ///< of the samples, whatever was chosen
    std::int64_t num_agreed = 0;  ///< chosen where it is right
  };
  Count& at(std::int64_t number);

  std::vector<Count> counts_;
};

}  // namespace headroom
