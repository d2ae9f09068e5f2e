#include "core/input_file.h"

#include <headroom/core/bytes.h>

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace headroom {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

bool has_kind(const std::string& path, mode_t kind) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && (status.st_mode & S_IFMT) == kind;
}

}  // namespace

std::string shown_path(std::string_view path) {
  constexpr std::size_t kMost = 200;
  std::string text;
  for (const char c : path.substr(0, kMost)) {
    const auto code = static_cast<unsigned char>(c);
    text += code < 0x20 || code == 0x7f ? fmt::format("\\x{:02x}", code) : std::string(1, c);
  }
  if (path.size() > kMost) text += fmt::format("... ({} characters)", path.size());
  return text;
}

bool path_exists(const std::string& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

bool is_folder(const std::string& path) noexcept { return has_kind(path, S_IFDIR); }

bool is_regular_file(const std::string& path) noexcept { return has_kind(path, S_IFREG); }

InputFile::InputFile(std::string path, ThrowAs kind) : path_(std::move(path)), fail_(kind) {
  // A path with a zero byte would be cut there.
  if (path_.find('\0') != std::string::npos) fail("no such file");
  // Without O_NONBLOCK, opening a pipe waits for a writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor_ < 0) fail(fmt::format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  std::string problem;
  if (::fstat(descriptor_, &status) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(status.st_mode)) {
    problem = fmt::format("is {}, not a file", kind_of(status.st_mode));
  }
  if (!problem.empty()) {
    ::close(descriptor_);
    fail(problem);
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::fail(const std::string& what) const {
  fail_(fmt::format("{}: {}", shown_path(path_), what));
  throw std::logic_error("a ThrowAs that does not throw");
}

void InputFile::read_at(std::int64_t offset, void* to, std::int64_t num_bytes) const {
  auto* out = static_cast<char*>(to);
  for (std::int64_t done = 0; done < num_bytes;) {
    const ssize_t count =
        ::pread(descriptor_, out + done, static_cast<std::size_t>(num_bytes - done), offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      fail(fmt::format("cannot be read at byte {}: {}", offset + done, std::strerror(errno)));
    if (count == 0)
      fail(fmt::format("ends at byte {}, before byte {}: was it cut while it was read?",
                       offset + done, offset + num_bytes));
    done += count;
  }
}

std::string InputFile::read_all(std::int64_t most_bytes) const {
  const auto check = [&](std::int64_t bytes) {
    if (bytes > most_bytes)
      fail(fmt::format("is larger than {} bytes ({}), the most that is read of such a file",
                       most_bytes, format_bytes(most_bytes)));
  };
  check(size_);
  // The size may be wrong: files of the kernel say 0, and others may be written to at this moment.
  constexpr std::int64_t kPiece = 1 << 16;
  std::string text;
  for (std::int64_t done = 0;;) {
    const std::int64_t piece = std::max(kPiece, size_ - done);
    text.resize(static_cast<std::size_t>(done + piece));
    const ssize_t count =
        ::pread(descriptor_, text.data() + done, static_cast<std::size_t>(piece), done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(fmt::format("cannot be read: {}", std::strerror(errno)));
    done += count;
    check(done);
    text.resize(static_cast<std::size_t>(done));
    if (count == 0) return text;
  }
}

bool json_depth_is_allowed(std::string_view text) {
  int depth = 0;
  bool in_text = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_text) {
      if (c == '\\') ++i;
      in_text = c != '"';
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMostJsonDepth) return false;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return true;
}

std::string read_json_text(const std::string& path, ThrowAs fail, std::int64_t most_bytes) {
  const InputFile file(path, fail);
  std::string text = file.read_all(most_bytes);
  if (!json_depth_is_allowed(text))
    file.fail(fmt::format("is not read: its JSON is nested deeper than {}", kMostJsonDepth));
  return text;
}

}  // namespace headroom
