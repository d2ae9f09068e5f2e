#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace headroom {

/// SHA-256 of a stream of bytes.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(const void* data, std::size_t num_bytes);
  /// The digest in lower-case hexadecimal. Call once, at the end.
  std::string hex_digest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headroom
