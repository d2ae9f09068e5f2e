#pragma once

#include "core/input_file.h"

#include <cstddef>
#include <string>
#include <string_view>

namespace headroom {

/// A file that appears whole or not at all: it is written beside its place, brought to the disk and
/// renamed. A reader sees the old file or the new one, never a half. Only regular files are
/// replaced: a device or a pipe is written to as it is, a folder is refused; of a symbolic link,
/// what it points to is replaced. Errors are of the kind `fail` and name the path; what was written
/// until then is removed.
class OutputFile {
 public:
  explicit OutputFile(std::string path, ThrowAs fail = throw_as<ConfigError>);
  /// Removes what was not committed.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t num_bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Makes the file appear. Nothing is written after it.
  void commit();

 private:
  [[noreturn]] void fail(const char* what);
  void discard() noexcept;

  std::string path_;       // as given, for messages
  std::string target_;     // what is replaced
  std::string temporary_;  // empty: written to as it is
  ThrowAs fail_;
  int descriptor_ = -1;
};

/// `text` as the whole contents of `path`, as OutputFile does it.
void write_file_atomically(const std::string& path, const std::string& text);

/// Brings a folder's list of names to the disk: a rename is only as durable as that.
void sync_folder(const std::string& folder, ThrowAs fail);

}  // namespace headroom
