#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// One tensor of a safetensors file.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;      ///< where its bytes start in the file
  std::int64_t num_bytes = 0;  ///< row-major, little-endian
  std::size_t shard = 0;       ///< which file of several
};

/// Tensors in files of Hugging Face's safetensors format: what is there is known at once, and each
/// tensor is read when it is asked for.
///   - `path` is a file, an index of several (*.safetensors.index.json), or a folder with
///     model.safetensors or model.safetensors.index.json.
///   - Throws DataError, naming the file and what is wrong, on one that is missing or malformed:
///     header length, JSON, unknown dtypes, shapes that overflow or do not fit their bytes,
///     overlaps and holes, bytes beyond the end, names that occur twice, shards that do not fit
///     their index.
///   - Dtypes are F64, F32, F16, BF16, I64, I32, I16, I8, U8 and BOOL.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&& other) noexcept;

  /// Of all files, by shard and place in the file.
  const std::vector<SafetensorsEntry>& entries() const;
  /// Null when there is no tensor of this name.
  const SafetensorsEntry* find(const std::string& name) const;

  /// Throws DataError unless the names of the files are exactly these, each with the shape of its
  /// tensor, and whole numbers where the tensor has them.
  void check_all(const std::vector<std::pair<std::string, at::Tensor>>& into) const;

  /// Fills `into`, which has the shape of the tensor and may be a view with any strides. Bytes go
  /// straight into place where dtype and layout are the same, and otherwise through a piece of
  /// about a MiB. Converts between floating-point types and between integer types. Throws DataError
  /// when the shapes differ, one holds whole numbers and the other does not, or the file was cut
  /// since it was opened.
  void read(const SafetensorsEntry& entry, const at::Tensor& into) const;

  /// True when the tensor has this shape and, converted to its dtype, these values.
  bool equals(const SafetensorsEntry& entry, const at::Tensor& tensor) const;

 private:
  void check(const SafetensorsEntry& entry, const at::Tensor& into) const;

  struct Shards;
  std::unique_ptr<Shards> shards_;
};

/// All tensors of a file, an index or a folder, as new tensors on the CPU.
std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

/// Fills existing tensors by name. Throws DataError as SafetensorsReader and its check_all() do,
/// before anything is changed; only that a file was cut meanwhile is found later.
void load_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& into);

/// Writes a file that appears whole or not at all, and returns its SHA-256. Tensors may be views
/// and on any device; besides them a piece of about a MiB is in memory. Throws ConfigError on two
/// tensors of one name, on a dtype that the format lacks, and when the file cannot be written.
std::string save_safetensors(const std::string& path,
                             const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                             const std::map<std::string, std::string>& metadata = {
                                 {"format", "pt"}});

}  // namespace headroom
