#pragma once

#include <cstddef>

namespace headroom {

/// Memory that is a mapping of a file, known by its address, so that whoever reads much of it once
/// can let go of it again.
void add_mapped_pages(const void* address, std::size_t num_bytes);
void remove_mapped_pages(const void* address);

/// Lets the system drop what it holds in memory of the mapping that `data` points into; it is read
/// again when it is touched, and nothing is lost. Does nothing for any other memory. Thread-safe.
void release_mapped_pages(const void* data);

}  // namespace headroom
