#pragma once

// Ranks as threads of the test.

#include <headroom/comm/communicator.h>

#include <chrono>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace headroom::testing {

inline constexpr std::chrono::seconds kTestTimeout{
    20};  // far above what a test takes, so that a defect ends it

/// Runs `body` on every rank, and gives what each of them threw (null: nothing).
inline std::vector<std::exception_ptr> run_ranks(std::int64_t size,
                                                 const std::function<void(Communicator&)>& body,
                                                 std::chrono::milliseconds timeout = kTestTimeout) {
  const auto join = make_thread_communicators(size, timeout);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const std::unique_ptr<Communicator> comm = join(rank);
        body(*comm);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The message of an error of type `E`; empty when there is none, or another.
template <typename E>
std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const E& found) {
    return found.what();
  } catch (...) {
    return "";
  }
}

}  // namespace headroom::testing
