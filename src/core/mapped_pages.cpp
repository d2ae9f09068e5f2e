#include "core/mapped_pages.h"

#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>

namespace headroom {
namespace {

struct Mappings {
  std::mutex mutex;
  std::map<const char*, std::size_t> by_address;
};

// Tensors on mappings may outlive every static object.
Mappings& mappings() {
  static auto* all = new Mappings;
  return *all;
}

}  // namespace

void add_mapped_pages(const void* address, std::size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  mappings().by_address[static_cast<const char*>(address)] = num_bytes;
}

void remove_mapped_pages(const void* address) {
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  mappings().by_address.erase(static_cast<const char*>(address));
}

void release_mapped_pages(const void* data) {
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  const auto after = mappings().by_address.upper_bound(static_cast<const char*>(data));
  if (after == mappings().by_address.begin()) return;
  const auto [address, num_bytes] = *std::prev(after);
  // The mapping is shared with the file: what was changed stays.
  if (static_cast<const char*>(data) < address + num_bytes)
    ::madvise(const_cast<char*>(address), num_bytes, MADV_DONTNEED);
}

}  // namespace headroom
