#pragma once

#include <string>

namespace headroom::testing {

/// The message of the error of type `E` that `action` throws; "no error" when it throws nothing.
template <typename E, typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace headroom::testing
