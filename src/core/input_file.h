#pragma once

#include <headroom/core/error.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace headroom {

/// The kind of error that a reader or writer throws: throw_as<DataError>, throw_as<SnapshotError>
/// ...
using ThrowAs = void (*)(const std::string& message);
template <typename Kind>
[[noreturn]] void throw_as(const std::string& message) {
  throw Kind(message);
}

/// A path for messages, on one line and of readable length whatever is in it.
std::string shown_path(std::string_view path);

/// As in std::filesystem, but false for whatever cannot be asked (too long, a loop of links, no
/// permission).
bool path_exists(const std::string& path) noexcept;
bool is_folder(const std::string& path) noexcept;
bool is_regular_file(const std::string& path) noexcept;

/// The one way to open a file that somebody else wrote. Only regular files are opened: a folder, a
/// pipe, a device or a socket is refused without waiting for it. All errors are of the kind `fail`
/// and name the path. Reading is const and safe from several threads.
class InputFile {
 public:
  explicit InputFile(std::string path, ThrowAs fail = throw_as<DataError>);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }  ///< when it was opened
  int descriptor() const { return descriptor_; }

  /// Reads exactly [offset, offset + num_bytes) into `to`. Fails when the file ends before, also
  /// when it was cut after it was opened (memory mapped from such a file would end the program).
  void read_at(std::int64_t offset, void* to, std::int64_t num_bytes) const;
  /// The whole file. Fails when it is longer than `most_bytes`.
  std::string read_all(std::int64_t most_bytes) const;

  [[noreturn]] void fail(const std::string& what) const;

 private:
  std::string path_;
  ThrowAs fail_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

/// Nothing that is read as JSON is deeper than this: values are walked by recursion.
inline constexpr int kMostJsonDepth = 64;
/// False for text whose objects and lists are nested deeper. Looks at brackets alone: that the text
/// is JSON is left to the parser.
bool json_depth_is_allowed(std::string_view text);

/// A file of JSON, ready to be parsed: at most `most_bytes` long and kMostJsonDepth deep.
inline constexpr std::int64_t kMostJsonBytes = std::int64_t{64} << 20;
std::string read_json_text(const std::string& path, ThrowAs fail = throw_as<DataError>,
                           std::int64_t most_bytes = kMostJsonBytes);

}  // namespace headroom
