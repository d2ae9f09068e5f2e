#pragma once

// Older LibTorch holds autograd's nodes by std::shared_ptr, newer (2.14 for one) by
// c10::intrusive_ptr. Which one it is, its own functions say.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace headroom {

/// Owns a node of unknown type.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

constexpr bool kNodesAreShared = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

/// Owns a node of type T.
template <class T>
using NodePtrOf = std::conditional_t<kNodesAreShared, std::shared_ptr<T>, c10::intrusive_ptr<T>>;

/// A new node, which its last owner deletes without recursion: graphs are deeper than the stack.
template <class T>
NodePtrOf<T> make_node() {
  if constexpr (kNodesAreShared) {
    return NodePtrOf<T>(new T, [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

}  // namespace headroom
