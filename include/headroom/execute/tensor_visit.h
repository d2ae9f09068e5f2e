#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/string_view.h>
#include <torch/nn/modules/container/any.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Finds the tensors inside of arguments and results: a tensor, or a vector, array, pair, tuple or
// optional of such, at any depth, and what torch::nn::AnyValue holds of the common ones. Values of
// any other type have none.
namespace headroom::detail {

template <typename T, typename = void>
struct TensorVisit {
  static constexpr bool kHasTensors = false;
  template <typename Value, typename Visitor>
  static void each(Value&, Visitor&&) {}
};

template <typename T>
inline constexpr bool kHasTensors = TensorVisit<std::decay_t<T>>::kHasTensors;

/// Calls `visitor` with each tensor in `value`, in order; undefined ones too.
template <typename Value, typename Visitor>
void each_tensor(Value& value, Visitor&& visitor) {
  TensorVisit<std::decay_t<Value>>::each(value, visitor);
}

template <>
struct TensorVisit<at::Tensor> {
  static constexpr bool kHasTensors = true;
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    visitor(value);
  }
};

template <typename Element>
struct RangeVisit {
  static constexpr bool kHasTensors = detail::kHasTensors<Element>;
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    if constexpr (kHasTensors) {
      for (auto& element : value) each_tensor(element, visitor);
    }
  }
};

template <typename Element, typename Alloc>
struct TensorVisit<std::vector<Element, Alloc>> : RangeVisit<Element> {};
template <typename Element, std::size_t size>
struct TensorVisit<std::array<Element, size>> : RangeVisit<Element> {};
template <typename Element>
struct TensorVisit<c10::ArrayRef<Element>> : RangeVisit<Element> {};

template <typename... Elements>
struct TensorVisit<std::tuple<Elements...>> {
  static constexpr bool kHasTensors = (detail::kHasTensors<Elements> || ...);
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    std::apply([&](auto&... element) { (each_tensor(element, visitor), ...); }, value);
  }
};

template <typename First, typename Second>
struct TensorVisit<std::pair<First, Second>> {
  static constexpr bool kHasTensors = detail::kHasTensors<First> || detail::kHasTensors<Second>;
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    each_tensor(value.first, visitor);
    each_tensor(value.second, visitor);
  }
};

// std::optional and, where it is another type, c10::optional.
template <typename T>
struct TensorVisit<T, std::void_t<typename T::value_type, decltype(std::declval<T&>().has_value()),
                                  decltype(*std::declval<T&>())>> {
  static constexpr bool kHasTensors = detail::kHasTensors<typename T::value_type>;
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    if (value.has_value()) each_tensor(*value, visitor);
  }
};

template <>
struct TensorVisit<torch::nn::AnyValue> {
  static constexpr bool kHasTensors = true;
  template <typename Value, typename Visitor>
  static void each(Value& value, Visitor&& visitor) {
    using at::Tensor;
    static_cast<void>(visit_if<Tensor>(value, visitor) ||
                      visit_if<std::tuple<Tensor, Tensor>>(value, visitor) ||
                      visit_if<std::tuple<Tensor, Tensor, Tensor>>(value, visitor) ||
                      visit_if<std::tuple<Tensor, std::tuple<Tensor, Tensor>>>(value, visitor) ||
                      visit_if<std::vector<Tensor>>(value, visitor));
  }

 private:
  template <typename Held, typename Visitor>
  static bool visit_if(const torch::nn::AnyValue& value, Visitor&& visitor) {
    Held* held = const_cast<torch::nn::AnyValue&>(value).try_get<Held>();
    if (held) each_tensor(*held, visitor);
    return held != nullptr;
  }
};

/// How an argument is kept for later: by value, also where it was only a view of somebody's memory.
template <typename T>
struct Kept {
  using type = T;
};
template <typename Element>
struct Kept<c10::ArrayRef<Element>> {
  using type = std::vector<Element>;
};
template <>
struct Kept<std::string_view> {
  using type = std::string;
};
template <typename T>
using KeptType = typename Kept<std::decay_t<T>>::type;

template <typename T>
KeptType<T> keep(const T& value) {
  if constexpr (std::is_same_v<KeptType<T>, std::decay_t<T>>) {
    return value;
  } else {
    return KeptType<T>(value.begin(), value.end());
  }
}

}  // namespace headroom::detail
