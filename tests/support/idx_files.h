#pragma once

// Small IDX files, right and wrong, for tests.

#include <zlib.h>

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace headroom::testing {

/// A folder of its own that is gone when the object is.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("headroom_test_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_plain(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline void write_gzip(const std::string& path, const std::string& bytes) {
  const gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(file);
}

/// Magic number and sizes of an IDX file of bytes.
inline std::string idx_header(const std::vector<std::uint32_t>& shape) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(shape.size())};
  for (const std::uint32_t size : shape) {
    for (const int shift : {24, 16, 8, 0})
      bytes.push_back(static_cast<char>((size >> shift) & 0xff));
  }
  return bytes;
}

/// Pixel p of image i is (i + p) % 256.
inline std::string idx_images(std::uint32_t count, std::uint32_t rows = 28,
                              std::uint32_t columns = 28) {
  std::string bytes = idx_header({count, rows, columns});
  for (std::uint32_t i = 0; i < count; ++i) {
    for (std::uint32_t p = 0; p < rows * columns; ++p)
      bytes.push_back(static_cast<char>((i + p) & 0xff));
  }
  return bytes;
}

/// The label of image i is i % num_classes.
inline std::string idx_labels(std::uint32_t count, std::uint32_t num_classes = 10) {
  std::string bytes = idx_header({count});
  for (std::uint32_t i = 0; i < count; ++i) bytes.push_back(static_cast<char>(i % num_classes));
  return bytes;
}

inline constexpr const char* kTrainImages = "train-images-idx3-ubyte";
inline constexpr const char* kTrainLabels = "train-labels-idx1-ubyte";
inline constexpr const char* kTestImages = "t10k-images-idx3-ubyte";
inline constexpr const char* kTestLabels = "t10k-labels-idx1-ubyte";

/// A whole dataset of `count` images for training and half as many for tests, in `folder`, which is
/// made.
inline void write_idx_dataset(const std::string& folder, std::uint32_t count, bool gzip,
                              std::uint32_t rows = 28, std::uint32_t columns = 28) {
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& name, const std::string& bytes) {
    gzip ? write_gzip(folder + "/" + name + ".gz", bytes) : write_plain(folder + "/" + name, bytes);
  };
  write(kTrainImages, idx_images(count, rows, columns));
  write(kTrainLabels, idx_labels(count));
  write(kTestImages, idx_images(count / 2, rows, columns));
  write(kTestLabels, idx_labels(count / 2));
}

}  // namespace headroom::testing
