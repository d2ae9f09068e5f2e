#pragma once

#include <string>

namespace headroom {

/// A measured number for people: three significant digits, without an exponent from 0.0001 to a
/// thousand million, and whole above a hundred. format_figure(0.01234) is "0.0123",
/// format_figure(1234.5) is "1234".
std::string format_figure(double value);

/// A loss for people: four digits after the point, and three significant ones where it is small.
std::string format_loss(double value);

}  // namespace headroom
