#include "core/data_fingerprint.h"

#include "core/hash.h"
#include "core/input_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostFiles = 256;

void add_piece(Sha256& hash, const InputFile& file, std::int64_t offset, std::int64_t num_bytes) {
  std::vector<char> piece(static_cast<std::size_t>(num_bytes));
  file.read_at(offset, piece.data(), num_bytes);
  hash.update(piece.data(), piece.size());
}

void add_file(Sha256& hash, const std::string& name, const std::string& path) {
  constexpr std::int64_t kPieceBytes = 1 << 16;
  const InputFile file(path);
  const std::string line = fmt::format("{} {}\n", name, file.size());
  hash.update(line.data(), line.size());
  const std::int64_t num_bytes = std::min(kPieceBytes, file.size());
  add_piece(hash, file, 0, num_bytes);
  add_piece(hash, file, file.size() - num_bytes, num_bytes);
}

// Files at any depth, in the order of their names; no more than so many are remembered.
std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (const fs::recursive_directory_iterator end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (!entry->is_regular_file(ignored)) continue;
    names.push_back(entry->path().lexically_relative(folder).string());
    std::push_heap(names.begin(), names.end());
    if (names.size() <= kMostFiles) continue;
    std::pop_heap(names.begin(), names.end());
    names.pop_back();
  }
  std::sort_heap(names.begin(), names.end());
  return names;
}

}  // namespace

std::string data_fingerprint(const std::string& path) {
  Sha256 hash;
  if (is_regular_file(path)) {
    add_file(hash, "", path);
  } else if (is_folder(path)) {
    for (const std::string& name : files_in(path)) {
      try {
        add_file(hash, name, (fs::path(path) / name).string());
      } catch (const DataError&) {
        hash.update(name.data(), name.size());  // whether it matters is the reader's affair
      }
    }
  } else {
    return "";
  }
  return hash.hex_digest();
}

}  // namespace headroom
