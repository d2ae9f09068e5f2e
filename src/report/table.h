#pragma once

#include <string>
#include <vector>

namespace headroom {

/// Rows of text under a header, in columns as wide as they need to be. The first column is aligned
/// left, the others right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  /// A row has as many cells as the header; missing ones are empty.
  Table& add_row(std::vector<std::string> cells);
  std::string to_text() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace headroom
