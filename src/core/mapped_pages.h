#pragma once

#include <algorithm>
#include <cstddef>

namespace headroom {

/// Memory that is a mapping of a file, known by its address, so that whoever reads much of it once
/// can let go of it again.
void add_mapped_pages(const void* address, std::size_t num_bytes);
void remove_mapped_pages(const void* address);

/// Lets the system drop what it holds in memory of the mapping that `data` points into; it is read
/// again when it is touched, and nothing is lost. Does nothing for any other memory. Thread-safe.
void release_mapped_pages(const void* data);

/// Calls visit(data, num_bytes) for one piece of the memory after the other. Of a mapping no more
/// than a piece is in memory at once.
template <typename Visit>
void for_each_mapped_piece(const void* data, std::size_t num_bytes, const Visit& visit) {
  constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
  const char* bytes = static_cast<const char*>(data);
  for (std::size_t done = 0; done < num_bytes; done += kPieceBytes) {
    visit(bytes + done, std::min(kPieceBytes, num_bytes - done));
    release_mapped_pages(bytes + done);
  }
}

}  // namespace headroom
