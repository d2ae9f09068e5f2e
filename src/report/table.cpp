#include "report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace headroom {

Table& Table::add_row(std::vector<std::string> cells) {
  cells.resize(header_.size());
  rows_.push_back(std::move(cells));
  return *this;
}

std::string Table::to_text() const {
  std::vector<std::size_t> widths;
  for (std::size_t column = 0; column < header_.size(); ++column) {
    std::size_t width = header_[column].size();
    for (const auto& row : rows_) width = std::max(width, row[column].size());
    widths.push_back(width);
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (std::size_t column = 0; column < cells.size(); ++column) {
      if (column > 0) text += "  ";
      text += column == 0 ? fmt::format("{:<{}}", cells[column], widths[column])
                          : fmt::format("{:>{}}", cells[column], widths[column]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string text = line(header_);
  std::size_t total = 0;
  for (const std::size_t width : widths) total += width + 2;
  text += std::string(total >= 2 ? total - 2 : 0, '-') + "\n";
  for (const auto& row : rows_) text += line(row);
  return text;
}

}  // namespace headroom
