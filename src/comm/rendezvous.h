#pragma once

// Where ranks of several machines find each other: rank 0 keeps a small table of texts by name that
// all of them write to and read from, until they are connected.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace headroom {

/// Serves the table, on a thread of its own, for as long as it lives.
///   - Listens on the address that the ranks were given alone, where this machine has it.
///   - Who connects asks one question and is answered. A connection that sends anything else, or
///     has not asked within a few seconds, is closed; a stranger costs neither memory nor time.
class RendezvousServer {
 public:
  /// Throws std::runtime_error when nobody can be served there.
  RendezvousServer(const std::string& host, std::int64_t port);
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

/// A rank's way to the table. Each call connects anew, and waits for the place to be opened.
class RendezvousClient {
 public:
  RendezvousClient(std::string host, std::int64_t port) : host_(std::move(host)), port_(port) {}

  /// Throws std::runtime_error when the place does not answer within `timeout`, and on a name or
  /// text that is longer than ranks need.
  void set(const std::string& name, const std::string& text,
           std::chrono::milliseconds timeout) const;
  /// Waits for the name to be set. Throws like set().
  std::string get(const std::string& name, std::chrono::milliseconds timeout) const;
  /// Nothing where it is not set.
  std::optional<std::string> find(const std::string& name, std::chrono::milliseconds timeout) const;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  std::string ask(const std::string& question, Deadline deadline) const;

  std::string host_;
  std::int64_t port_;
};

}  // namespace headroom
