#pragma once

// Charts as inline SVG. Colours are classes that the page defines (see html_page.cpp), so that a
// chart follows light and dark.

#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Text that is safe between tags and in quoted attributes.
std::string escape_html(const std::string& text);

struct ChartLine {
  std::string name;
  std::string css_class;
  std::vector<std::pair<double, double>>
      points;  ///< by rising x; those that are not finite leave a gap
  bool has_markers = false;
};

/// Lines over a common x axis of whole numbers.
std::string line_chart(const std::vector<ChartLine>& lines, const std::string& x_name, int height);

struct ChartLayer {
  std::string name;
  std::string css_class;
  std::vector<double> bytes;  ///< by column
};

struct StackedChart {
  std::vector<std::string> columns;  ///< names, shown when pointed at
  std::vector<ChartLayer> layers;    ///< from the bottom up
  std::vector<double> tops;          ///< by column: a mark above the stack
  std::string tops_name;
  double limit = 0.0;  ///< a line across; 0: none
  std::string limit_name;
};

/// Columns of bytes without gaps between them.
std::string stacked_chart(const StackedChart& chart, int height);

}  // namespace headroom
