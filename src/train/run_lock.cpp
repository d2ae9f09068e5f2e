#include "train/run_lock.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "train/snapshot_folder.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace headroom {
namespace {

// The last to hold the lock removes its file: what was locked may be a file without a name.
bool is_still_there(int descriptor, const std::string& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

std::string process_in(int descriptor) {
  char text[32] = {};
  const ssize_t count = ::pread(descriptor, text, sizeof(text) - 1, 0);
  return count > 0 ? std::string(text, static_cast<std::size_t>(count)) : "unknown";
}

}  // namespace

RunLock::RunLock(const std::string& output_dir) : path_(output_dir + "/.run.lock") {
  while (true) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (descriptor_ < 0)
      throw ConfigError(fmt::format("--output_dir '{}' cannot be written: {}",
                                    shown_path(output_dir), std::strerror(errno)));
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      const bool is_taken = errno == EWOULDBLOCK;
      const std::string process = process_in(descriptor_);
      ::close(descriptor_);
      if (is_taken)
        throw ConfigError(
            fmt::format("--output_dir '{}' is being written by another run (process {}): give "
                        "another folder, or wait for it",
                        shown_path(output_dir), process));
      descriptor_ = -1;  // a file system without locks: nothing can be known
      return;
    }
    if (is_still_there(descriptor_, path_)) break;
    ::close(descriptor_);
  }
  const std::string process = std::to_string(::getpid());
  if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, process.data(), process.size(),
                                                   0) != static_cast<ssize_t>(process.size())) {
    // A full disk: the lock holds all the same, only its owner is not known.
  }
  remove_stale_snapshots(output_dir);
}

RunLock::~RunLock() {
  if (descriptor_ < 0) return;
  ::unlink(path_.c_str());
  ::close(descriptor_);
}

}  // namespace headroom
