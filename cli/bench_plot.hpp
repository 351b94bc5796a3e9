#pragma once
// Plots as SVG text: lines over an axis that may be logarithmic, and horizontal bars.

#include <string>
#include <utility>
#include <vector>

namespace attnspan::cli {

std::string escaped(const std::string& text);  // for HTML and SVG

struct Axis {
  std::string label;
  bool logarithmic = false;
};

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;
  bool line = true;  // joined
  bool dashed = false;
  bool marks = true;
};

// "" where there are no points.
std::string line_plot(const std::string& title, const Axis& x, const Axis& y,
                      const std::vector<Series>& series);

struct Bar {
  std::string label;
  double value = 0;
  std::string text;  // beside the bar
  size_t color = 0;
};
// Bars from 0 to `end`; a mark at 1 where `mark_one`.
std::string bar_plot(const std::string& title, const std::vector<Bar>& bars, double end, bool mark_one);

}  // namespace attnspan::cli
