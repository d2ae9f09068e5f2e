#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace headroom {

/// Counts the bytes that tensors of the meta device, which have shapes but no memory, would occupy.
/// Running a stage on such tensors makes the same allocations in the same order as on the CPU, so
/// that live and peak bytes come out equal and nothing is computed. The operators that LibTorch
/// lacks there are added at the first call of instance(). Thread-safe.
class ShapeMeter {
 public:
  /// Installs the meter at the first call. Tensors made before are not counted.
  static ShapeMeter& instance();

  std::int64_t live_bytes() const;
  std::int64_t peak_bytes() const;  ///< since the last reset_peak()
  void reset_peak();

  ShapeMeter(const ShapeMeter&) = delete;
  ShapeMeter& operator=(const ShapeMeter&) = delete;

 private:
  ShapeMeter() = default;
};

/// While it lives, tensors that this thread makes without naming a device are made on the meta
/// device: a model built inside it has its sizes and no memory. Do not run operators on other
/// tensors inside.
class ShapeOnlyScope {
 public:
  ShapeOnlyScope();
  ~ShapeOnlyScope();
  ShapeOnlyScope(const ShapeOnlyScope&) = delete;
  ShapeOnlyScope& operator=(const ShapeOnlyScope&) = delete;

 private:
  struct Before;
  std::unique_ptr<Before> before_;
};

/// A few operators (convolutions, norms) need scratch memory whose size is known only by running
/// them, alone and on a few samples, which is what happens when they meet meta tensors. While this
/// lives they throw c10::Error on this thread instead.
class CountOnlyScope {
 public:
  CountOnlyScope();
  ~CountOnlyScope();
  CountOnlyScope(const CountOnlyScope&) = delete;
  CountOnlyScope& operator=(const CountOnlyScope&) = delete;

 private:
  bool before_;
};

/// Turns tensors into their shapes, in place, for as long as it lives: whoever holds them sees meta
/// tensors, and afterwards the old contents. Parameters stay leaves. They must have no gradient,
/// and nothing else may use them meanwhile.
class MetaSwapScope {
 public:
  explicit MetaSwapScope(const std::vector<at::Tensor>& tensors);
  ~MetaSwapScope();
  MetaSwapScope(const MetaSwapScope&) = delete;
  MetaSwapScope& operator=(const MetaSwapScope&) = delete;

  /// Leaves them as shapes; their memory is given back.
  void keep() { originals_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>>
      originals_;  // the tensor, and another one with its contents
};

/// A tensor of the same shape on the meta device; undefined stays undefined.
at::Tensor shape_of(const at::Tensor& tensor);

}  // namespace headroom
