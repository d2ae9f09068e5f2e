#include "execute/spill_file.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace headroom {
namespace {

// A page of the file system: space is given back in whole ones.
constexpr std::int64_t kPageBytes = 4096;

std::string folder_or_default(const std::string& folder) {
  if (!folder.empty()) return folder;
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary ? temporary : "/tmp";
}

int open_nameless(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
    return descriptor;
  // Some file systems know no nameless files: take the name away at once.
  std::string path = folder + "/headroom-spill-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

}  // namespace

SpillFile::SpillFile(const std::string& folder)
    : folder_(folder_or_default(folder)), descriptor_(open_nameless(folder_)) {
  if (descriptor_ < 0) {
    throw ConfigError(fmt::format(
        "cannot make a spill file in '{}': {}; choose a folder that exists and can be written",
        folder_, std::strerror(errno)));
  }
}

SpillFile::~SpillFile() { ::close(descriptor_); }

std::int64_t SpillFile::write(const void* data, std::size_t num_bytes) {
  std::int64_t offset = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    offset = end_;
    end_ += (static_cast<std::int64_t>(num_bytes) + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  for (std::size_t done = 0; done < num_bytes;) {
    const ::ssize_t count =
        ::pwrite(descriptor_, static_cast<const char*>(data) + done, num_bytes - done,
                 static_cast<::off_t>(offset) + static_cast<::off_t>(done));
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      const std::string reason = count == 0 ? "nothing was written" : std::strerror(errno);
      release(offset, num_bytes);
      throw BudgetError(fmt::format(
          "cannot spill {} to '{}': {}; choose a folder with more space, or keep more in memory",
          format_bytes(static_cast<std::int64_t>(num_bytes)), folder_, reason));
    }
  }
  return offset;
}

void SpillFile::read(std::int64_t offset, void* data, std::size_t num_bytes) const {
  for (std::size_t done = 0; done < num_bytes;) {
    const ::ssize_t count = ::pread(descriptor_, static_cast<char*>(data) + done, num_bytes - done,
                                    static_cast<::off_t>(offset) + static_cast<::off_t>(done));
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      throw DataError(
          fmt::format("cannot read {} back from the spill file in '{}' at offset {}: {}",
                      format_bytes(static_cast<std::int64_t>(num_bytes)), folder_, offset,
                      count == 0 ? "the file is too short" : std::strerror(errno)));
    }
  }
}

void SpillFile::release(std::int64_t offset, std::size_t num_bytes) noexcept {
  const std::int64_t length =
      (static_cast<std::int64_t>(num_bytes) + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (offset + length == end_) {
    end_ = offset;
    static_cast<void>(::ftruncate(descriptor_, static_cast<::off_t>(end_)) == 0);
  } else {
    // Where holes are not supported the space comes back with the file.
    ::fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<::off_t>(offset), static_cast<::off_t>(length));
  }
}

}  // namespace headroom
