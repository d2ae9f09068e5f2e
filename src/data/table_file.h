#pragma once

// Rows with named columns: .csv, .tsv and .jsonl.

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Whether the ending of the name says that it is such a file.
bool is_table_name(const std::string& name);

/// Some columns of a file, row by row.
struct Table {
  std::string path;
  std::vector<std::vector<std::string>> columns;  ///< in the order in which they were asked for
  std::vector<std::int64_t> rows;                 ///< where each row stands in the file, from 1

  std::int64_t size() const { return static_cast<std::int64_t>(rows.size()); }
  /// "reviews.csv: row 7": the header of a .csv is row 1.
  std::string place(std::int64_t index) const;
};

/// Reads the named columns of
/// - .csv and .tsv: the first row names the columns; fields with the separator, quotes or line ends
///   are in double quotes, where a quote is written twice;
/// - .jsonl: an object per line; values are texts, numbers, true or false. Empty lines are skipped.
/// Values are UTF-8. Throws DataError, naming file and row, on a column that is missing, a row with
/// too many or too few fields, an open quote, text that is no UTF-8 or no JSON, and a file without
/// rows. `flags` are the flags that named the columns, for messages.
Table read_table(const std::string& path, const std::vector<std::string>& columns,
                 const std::vector<std::string>& flags);

}  // namespace headroom
