#pragma once

#include "core/hash.h"
#include "core/mapped_pages.h"
#include "core/output_file.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace headroom {

/// What tells a file from any other.
struct FileDigest {
  std::string sha256;
  std::int64_t num_bytes = 0;
};

/// An OutputFile that counts and hashes what is written.
class HashedFile {
 public:
  explicit HashedFile(std::string path, ThrowAs fail = throw_as<ConfigError>)
      : file_(std::move(path), fail) {}

  void write(const void* data, std::size_t num_bytes) {
    for_each_mapped_piece(data, num_bytes, [&](const void* piece, std::size_t size) {
      file_.write(piece, size);
      hash_.update(piece, size);
    });
    num_bytes_ += static_cast<std::int64_t>(num_bytes);
  }
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Makes the file appear. Nothing is written after it.
  FileDigest commit() {
    file_.commit();
    return {hash_.hex_digest(), num_bytes_};
  }

 private:
  OutputFile file_;
  Sha256 hash_;
  std::int64_t num_bytes_ = 0;
};

}  // namespace headroom
