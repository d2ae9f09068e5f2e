#include "core/output_file.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

namespace headroom {
namespace {

// Where links end; the path itself when there is nothing yet.
std::string resolved(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

}  // namespace

OutputFile::OutputFile(std::string path, ThrowAs kind)
    : path_(std::move(path)), target_(path_), fail_(kind) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  if (!exists && errno != ENOENT) fail("write");  // such as a loop of links
  if (exists && (S_ISDIR(status.st_mode) || S_ISBLK(status.st_mode) || S_ISSOCK(status.st_mode)))
    fail_(fmt::format("cannot write '{}': it is {}, not a file", shown_path(path_),
                      S_ISDIR(status.st_mode)   ? "a folder"
                      : S_ISBLK(status.st_mode) ? "a device"
                                                : "a socket"));
  if (exists && !S_ISREG(status.st_mode)) {
    // Without O_NONBLOCK, opening a pipe waits for a reader.
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor_ < 0) fail("write");
    ::fcntl(descriptor_, F_SETFL, ::fcntl(descriptor_, F_GETFL) & ~O_NONBLOCK);
    return;
  }
  if (exists) target_ = resolved(path_);
  temporary_ = fmt::format("{}.{}.tmp", target_, ::getpid());
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
                       exists ? status.st_mode & 0777 : 0666);
  if (descriptor_ < 0) {
    temporary_.clear();  // it is not ours
    fail("write");
  }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() noexcept {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::fail(const char* what) {
  const int error = errno;
  discard();
  fail_(fmt::format("cannot {} '{}': {}", what, shown_path(path_), std::strerror(error)));
  throw std::logic_error("a ThrowAs that does not throw");
}

void OutputFile::write(const void* data, std::size_t num_bytes) {
  const auto* bytes = static_cast<const char*>(data);
  for (std::size_t done = 0; done < num_bytes;) {
    const ssize_t count = ::write(descriptor_, bytes + done, num_bytes - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write");
    done += static_cast<std::size_t>(count);
  }
}

void OutputFile::commit() {
  if (!temporary_.empty()) {
    if (::fsync(descriptor_) != 0) fail("write");
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("replace");
    temporary_.clear();
  }
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) fail("write");
}

void write_file_atomically(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(text);
  file.commit();
}

void sync_folder(const std::string& folder, ThrowAs fail) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool done = descriptor >= 0 && ::fsync(descriptor) == 0;
  const int error = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (!done)
    fail(fmt::format("{}: cannot be written to the disk: {}", shown_path(folder),
                     std::strerror(error)));
}

}  // namespace headroom
