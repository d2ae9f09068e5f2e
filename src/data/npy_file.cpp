#include "data/npy_file.h"

#include "core/input_file.h"
#include "core/text.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

namespace headroom {
namespace {

struct TypeRow {
  const char* descr;
  at::ScalarType dtype;
};
constexpr TypeRow kTypes[] = {{"<f8", at::kDouble}, {"<f4", at::kFloat}, {"<f2", at::kHalf},
                              {"<i8", at::kLong},   {"<i4", at::kInt},   {"<i2", at::kShort},
                              {"|i1", at::kChar},   {"|u1", at::kByte},  {"|b1", at::kBool}};

// The text after "'key': ", without blanks before it.
std::string_view value_of(const InputFile& file, std::string_view header, const std::string& key) {
  const std::size_t at = header.find("'" + key + "':");
  if (at == std::string_view::npos) file.fail(fmt::format("its header says no '{}'", key));
  header.remove_prefix(at + key.size() + 3);
  header.remove_prefix(std::min(header.find_first_not_of(' '), header.size()));
  return header;
}

at::ScalarType parse_dtype(const InputFile& file, std::string_view header) {
  const std::string_view value = value_of(file, header, "descr");
  const std::size_t end = value.size() > 1 ? value.find('\'', 1) : std::string_view::npos;
  const std::string descr(value.substr(0, end == std::string_view::npos ? 0 : end + 1));
  for (const TypeRow& row : kTypes) {
    if (descr == fmt::format("'{}'", row.descr)) return row.dtype;
  }
  file.fail(
      fmt::format("elements of type {} cannot be served; known: f2, f4, f8, i1, i2, i4, i8, u1 and "
                  "b1, little-endian",
                  descr.empty() ? "(unknown)" : descr));
}

std::vector<std::int64_t> parse_shape(const InputFile& file, std::string_view header) {
  std::string_view value = value_of(file, header, "shape");
  const std::size_t end = value.find(')');
  if (!starts_with(value, "(") || end == std::string_view::npos)
    file.fail("the shape in its header is malformed");
  value = value.substr(1, end - 1);
  std::vector<std::int64_t> shape;
  while (value.find_first_not_of(" ,") != std::string_view::npos) {
    value.remove_prefix(value.find_first_not_of(" ,"));
    std::int64_t size = 0;
    const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), size);
    if (error != std::errc() || size < 0) file.fail("the shape in its header is malformed");
    shape.push_back(size);
    value.remove_prefix(static_cast<std::size_t>(stop - value.data()));
  }
  return shape;
}

}  // namespace

StoredArray read_npy_header(const std::string& path) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  constexpr std::int64_t kMostHeaderBytes = 1 << 20;
  const InputFile file(path);
  if (file.size() == 0) file.fail("is empty");
  unsigned char start[12] = {};
  if (file.size() < 12) file.fail("is too short for a .npy file");
  file.read_at(0, start, sizeof(start));
  if (std::string_view(reinterpret_cast<const char*>(start), kMagic.size()) != kMagic)
    file.fail("is no .npy file: it does not start with \\x93NUMPY");
  // Version 1 has two bytes for the length of the header, later ones four.
  const bool is_long = start[6] >= 2;
  std::int64_t header_bytes = start[8] | (start[9] << 8);
  if (is_long) header_bytes |= std::int64_t{start[10]} << 16 | std::int64_t{start[11]} << 24;
  const std::int64_t begin = (is_long ? 12 : 10) + header_bytes;
  if (begin > file.size() || header_bytes > kMostHeaderBytes) file.fail("its header is cut");
  std::string header(static_cast<std::size_t>(header_bytes), '\0');
  file.read_at(is_long ? 12 : 10, header.data(), header_bytes);
  if (!starts_with(value_of(file, header, "fortran_order"), "False"))
    file.fail("is in Fortran's order; save numpy.ascontiguousarray of it");
  return {path, std::filesystem::path(path).stem().string(), parse_dtype(file, header),
          parse_shape(file, header), begin};
}

}  // namespace headroom
