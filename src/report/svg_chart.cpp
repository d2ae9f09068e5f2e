#include "report/svg_chart.h"

#include <headroom/core/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace headroom {
namespace {

constexpr double kWidth = 880, kLeft = 66, kRight = 14, kTop = 10, kBottom = 40;
constexpr double kLargest = 1e290;  // that is drawn
constexpr std::size_t kMostPoints =
    600;  // more than there are pixels would only make the page large

// The range of an axis, widened to whole steps of 1, 2 or 5 times a power of ten (in `unit`).
struct Axis {
  double low = 0, high = 1, step = 1;

  // Values are at most kLargest, so that no step of it is beyond all numbers.
  static Axis over(double low, double high, double unit = 1.0) {
    constexpr double kSmallest = 1.0 / kLargest;
    if (high - low <= std::max(kSmallest, 1e-9 * std::max(std::abs(low), std::abs(high))))
      high = low + (std::abs(low) <= kSmallest ? 1.0 : std::abs(low) * 0.1);
    const double rough = (high - low) / unit / 5;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    Axis axis;
    axis.step = unit * power *
                (rough <= power       ? 1
                 : rough <= 2 * power ? 2
                 : rough <= 5 * power ? 5
                                      : 10);
    axis.low = std::floor(low / axis.step + 1e-9) * axis.step;
    axis.high = std::ceil(high / axis.step - 1e-9) * axis.step;
    return axis;
  }
  double share(double value) const { return (value - low) / (high - low); }
  std::vector<double> ticks() const {
    std::vector<double> values;
    for (int i = 0; low + i * step <= high + step * 1e-6; ++i) values.push_back(low + i * step);
    return values;
  }
};

std::string number_text(double value, double step) {
  if (std::abs(value) < step * 1e-6) return "0";
  if (std::abs(value) >= 1e6 || std::abs(value) < 1e-3) return fmt::format("{:.3g}", value);
  return fmt::format("{:.{}f}", value,
                     std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9))));
}

class Plot {
 public:
  Plot(Axis x, Axis y, int height) : x_(x), y_(y), height_(height) {}
  double at_x(double value) const { return kLeft + x_.share(value) * (kWidth - kLeft - kRight); }
  double at_y(double value) const {
    return kTop + (1 - y_.share(value)) * (height_ - kTop - kBottom);
  }
  double bottom() const { return height_ - kBottom; }

  template <class Text>
  std::string y_axis(const Text& text) const {
    std::string svg;
    for (const double tick : y_.ticks()) {
      svg += fmt::format(
          "<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text class=\"tick\" x=\"{:.1f}\" "
          "y=\"{:.1f}\" "
          "text-anchor=\"end\">{}</text>\n",
          kLeft, at_y(tick), kWidth - kRight, kLeft - 8, at_y(tick) + 4, text(tick));
    }
    return svg;
  }
  std::string x_axis(const std::string& name) const {
    std::string svg;
    for (const double tick : x_.ticks()) {
      svg += fmt::format(
          "<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
          at_x(tick), bottom() + 17, number_text(tick, x_.step));
    }
    return svg + x_name(name);
  }
  std::string x_name(const std::string& name) const {
    return fmt::format(
        "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kWidth - kRight, bottom() + 34, escape_html(name));
  }
  std::string wrap(const std::string& label, const std::string& inside) const {
    return fmt::format("<svg viewBox=\"0 0 {:.0f} {}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
                       kWidth, height_, escape_html(label), inside);
  }

 private:
  Axis x_, y_;
  int height_;
};

bool can_be_drawn(const std::pair<double, double>& point) {
  return std::abs(point.first) <= kLargest && std::abs(point.second) <= kLargest;
}

// Means of neighbours, so that a long run is no larger a page.
std::vector<std::pair<double, double>> thinned(
    const std::vector<std::pair<double, double>>& points) {
  if (points.size() <= kMostPoints) return points;
  std::vector<std::pair<double, double>> result;
  const std::size_t bucket = (points.size() + kMostPoints - 1) / kMostPoints;
  for (std::size_t first = 0; first < points.size(); first += bucket) {
    double sum = 0;
    std::size_t count = 0;
    const std::size_t last = std::min(points.size(), first + bucket);
    for (std::size_t i = first; i < last; ++i) {
      if (!can_be_drawn(points[i])) continue;
      sum += points[i].second;
      ++count;
    }
    result.emplace_back(points[last - 1].first,
                        count > 0 ? sum / static_cast<double>(count) : std::nan(""));
  }
  return result;
}

std::string draw_line(const Plot& plot, const ChartLine& line) {
  const auto points = thinned(line.points);
  std::string path, markers;
  bool is_open = false;
  for (const auto& point : points) {
    if (!can_be_drawn(point)) {
      is_open = false;
      continue;
    }
    const double x = plot.at_x(point.first), y = plot.at_y(point.second);
    path += fmt::format("{}{:.1f} {:.1f}", is_open ? "L" : "M", x, y);
    is_open = true;
    if (line.has_markers) {
      markers += fmt::format(
          "<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"><title>{} {:.5g} at "
          "{:.0f}</title></circle>\n",
          line.css_class, x, y, escape_html(line.name), point.second, point.first);
    }
  }
  return fmt::format("<path class=\"line {}\" d=\"{}\"/>\n{}", line.css_class, path, markers);
}

// A scale of bytes with ticks at round numbers of its unit.
double byte_unit(double largest) {
  double unit = 1;
  while (largest >= 2 * 1024 * unit) unit *= 1024;
  return unit;
}

std::string draw_layers(const Plot& plot, const StackedChart& chart) {
  std::string drawn;
  std::vector<double> base(chart.columns.size(), 0.0);
  for (const ChartLayer& layer : chart.layers) {
    std::string upper, lower;
    for (std::size_t i = 0; i < base.size(); ++i) {
      const double left = plot.at_x(static_cast<double>(i)),
                   right = plot.at_x(static_cast<double>(i + 1));
      const double top = plot.at_y(base[i] + layer.bytes[i]), bottom = plot.at_y(base[i]);
      upper += fmt::format("{}{:.1f} {:.1f}H{:.1f}", i == 0 ? "M" : "L", left, top, right);
      lower.insert(0, fmt::format("L{:.1f} {:.1f}H{:.1f}", right, bottom, left));
      base[i] += layer.bytes[i];
    }
    drawn += fmt::format("<path class=\"layer {}\" d=\"{}{}Z\"/>\n", layer.css_class, upper, lower);
  }
  return drawn;
}

std::string draw_tops(const Plot& plot, const StackedChart& chart) {
  std::string drawn;
  for (std::size_t i = 0; i < chart.tops.size(); ++i) {
    drawn += fmt::format("<path class=\"top\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>\n",
                         plot.at_x(static_cast<double>(i)), plot.at_y(chart.tops[i]),
                         plot.at_x(static_cast<double>(i + 1)));
  }
  return drawn;
}

std::string draw_limit(const Plot& plot, const StackedChart& chart) {
  if (chart.limit <= 0) return "";
  return fmt::format(
      "<path class=\"limit\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text class=\"limit\" x=\"{:.1f}\" "
      "y=\"{:.1f}\">{}</text>\n",
      kLeft, plot.at_y(chart.limit), kWidth - kRight, kLeft + 6, plot.at_y(chart.limit) - 5,
      escape_html(chart.limit_name));
}

// Invisible columns on top carry what is shown when pointed at.
std::string draw_hits(const Plot& plot, const StackedChart& chart) {
  std::string drawn;
  for (std::size_t i = 0; i < chart.columns.size(); ++i) {
    std::string text = chart.columns[i];
    for (auto layer = chart.layers.rbegin(); layer != chart.layers.rend(); ++layer) {
      text += fmt::format("\n{}: {}", layer->name,
                          format_bytes(static_cast<std::int64_t>(layer->bytes[i])));
    }
    if (!chart.tops.empty())
      text += fmt::format("\n{}: {}", chart.tops_name,
                          format_bytes(static_cast<std::int64_t>(chart.tops[i])));
    drawn += fmt::format(
        "<rect class=\"hit\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
        "height=\"{:.1f}\"><title>{}</title></rect>\n",
        plot.at_x(static_cast<double>(i)), kTop, plot.at_x(1) - plot.at_x(0), plot.bottom() - kTop,
        escape_html(text));
  }
  return drawn;
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      case '\'':
        safe += "&#39;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

std::string line_chart(const std::vector<ChartLine>& lines, const std::string& x_name, int height) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double low_x = kInfinity, high_x = -kInfinity, low_y = kInfinity, high_y = -kInfinity;
  std::string label;
  for (const ChartLine& line : lines) {
    for (const auto& point : thinned(line.points)) {
      if (!can_be_drawn(point)) continue;
      low_x = std::min(low_x, point.first);
      high_x = std::max(high_x, point.first);
      low_y = std::min(low_y, point.second);
      high_y = std::max(high_y, point.second);
    }
    label += (label.empty() ? "" : ", ") + line.name;
  }
  if (!(low_x <= high_x)) return "";
  Axis x = Axis::over(0, std::max(high_x, 1.0));
  x.high = std::max(high_x, 1.0);  // the last update is the right edge
  x.step = std::max(1.0, x.step);
  const Axis y = Axis::over(low_y, high_y);
  const Plot plot(x, y, height);
  std::string inside =
      plot.y_axis([&](double tick) { return number_text(tick, y.step); }) + plot.x_axis(x_name);
  for (const ChartLine& line : lines) inside += draw_line(plot, line);
  return plot.wrap(label + " by " + x_name, inside);
}

std::string stacked_chart(const StackedChart& chart, int height) {
  if (chart.columns.empty()) return "";
  double highest = chart.limit;
  for (std::size_t i = 0; i < chart.columns.size(); ++i) {
    double sum = 0.0;
    for (const ChartLayer& layer : chart.layers) sum += layer.bytes[i];
    highest = std::max({highest, sum, chart.tops.empty() ? 0.0 : chart.tops[i]});
  }
  Axis x;
  x.high = static_cast<double>(chart.columns.size());
  const Axis y =
      Axis::over(0, 1.08 * highest, byte_unit(highest));  // room for the name of the limit
  const Plot plot(x, y, height);
  std::string inside = plot.y_axis([](double tick) {
    std::string text = format_bytes(static_cast<std::int64_t>(std::llround(tick)));
    if (const std::size_t zeros = text.find(".00 "); zeros != std::string::npos)
      text.erase(zeros, 3);
    return text;
  });
  inside += draw_layers(plot, chart) + draw_tops(plot, chart) + draw_limit(plot, chart) +
            draw_hits(plot, chart) + plot.x_name("operations of one micro-batch, in order");
  return plot.wrap("bytes by owner", inside);
}

}  // namespace headroom
