#include "bench_plot.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "print.hpp"

namespace attnspan::cli {
namespace {

constexpr double kWidth = 640, kHeight = 360, kLeft = 64, kRight = 20, kTop = 34, kBottom = 46;
// Distinct without red against green, and on white and on dark alike.
constexpr const char* kColors[] = {"#3b82c4", "#e08a1e", "#2a9d8f", "#b5508f", "#7a6bc0",
                                   "#8a8a3a", "#c4603b", "#4aa3d8", "#777777", "#c49a3b"};

std::string number(double value) { return text_of(value, 1); }

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const std::string& attributes = "") {
  return "<text x='" + number(x) + "' y='" + number(y) + "' text-anchor='" + anchor + "' " + attributes +
         ">" + escaped(text) + "</text>";
}

std::string line_from(double x0, double y0, double x1, double y1, const std::string& attributes) {
  return "<line x1='" + number(x0) + "' y1='" + number(y0) + "' x2='" + number(x1) + "' y2='" + number(y1) +
         "' " + attributes + "/>";
}

std::string tick_text(double value) {
  const bool thousands = value >= 10000 && std::fmod(value, 1000) == 0;
  char text[32];
  std::snprintf(text, sizeof text, thousands ? "%gk" : "%.10g", thousands ? value / 1000 : value);
  return text;
}

// The range of one axis and where its ticks are.
struct Scale {
  double low = 0, high = 1;
  bool logarithmic = false;
  std::vector<double> ticks;

  double part(double value) const {  // 0 at low, 1 at high
    if (logarithmic) return (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
    return (value - low) / (high - low);
  }
};

Scale linear_scale(double largest) {
  Scale scale;
  const double magnitude = std::pow(10.0, std::floor(std::log10(largest / 4)));
  double step = magnitude;
  for (const double factor : {1.0, 2.0, 2.5, 5.0, 10.0}) {
    step = factor * magnitude;
    if (largest / step <= 6) break;
  }
  scale.high = step * std::ceil(largest / step);
  for (double tick = 0; tick <= scale.high * 1.0001; tick += step) scale.ticks.push_back(tick);
  return scale;
}

// Whole powers: of 2 within three decades, else of 10.
Scale logarithmic_scale(double smallest, double largest) {
  Scale scale;
  scale.logarithmic = true;
  const double base = largest / smallest < 1000 ? 2 : 10;
  const double first = std::floor(std::log(smallest) / std::log(base) + 1e-9);
  const double last = std::max(first + 1, std::ceil(std::log(largest) / std::log(base) - 1e-9));
  for (double power = first; power <= last; ++power) scale.ticks.push_back(std::pow(base, power));
  scale.low = scale.ticks.front();
  scale.high = scale.ticks.back();
  return scale;
}

Scale scale_of(const Axis& axis, const std::vector<Series>& series, bool x) {
  double smallest = std::numeric_limits<double>::infinity(), largest = 0;
  for (const Series& s : series) {
    for (const auto& point : s.points) {
      const double value = x ? point.first : point.second;
      smallest = std::min(smallest, value);
      largest = std::max(largest, value);
    }
  }
  return axis.logarithmic ? logarithmic_scale(smallest, largest) : linear_scale(largest);
}

struct Frame {
  Scale x, y;

  double px(double value) const { return kLeft + x.part(value) * (kWidth - kLeft - kRight); }
  double py(double value) const { return kHeight - kBottom - y.part(value) * (kHeight - kTop - kBottom); }

  std::string axes(const Axis& x_axis, const Axis& y_axis) const {
    std::string svg;
    for (const double tick : y.ticks) {
      svg += line_from(kLeft, py(tick), kWidth - kRight, py(tick), "class='grid'");
      svg += text_at(kLeft - 6, py(tick) + 4, "end", tick_text(tick));
    }
    for (const double tick : x.ticks) {
      svg += line_from(px(tick), kTop, px(tick), kHeight - kBottom, "class='grid'");
      svg += text_at(px(tick), kHeight - kBottom + 16, "middle", tick_text(tick));
    }
    svg += text_at((kLeft + kWidth - kRight) / 2, kHeight - 10, "middle", x_axis.label);
    const double middle = (kTop + kHeight - kBottom) / 2;
    svg += text_at(16, middle, "middle", y_axis.label, "transform='rotate(-90 16 " + number(middle) + ")'");
    return svg;
  }
};

std::string drawn(const Series& s, const Frame& frame, const char* color) {
  std::string svg;
  if (s.line) {
    svg += "<polyline fill='none' stroke-width='2' stroke='" + std::string(color) + "'" +
           (s.dashed ? " stroke-dasharray='6 4'" : "") + " points='";
    for (const auto& [x, y] : s.points) svg += number(frame.px(x)) + "," + number(frame.py(y)) + " ";
    svg += "'/>";
  }
  if (!s.marks) return svg;
  for (const auto& [x, y] : s.points) {
    svg += "<circle r='4' fill='" + std::string(color) + "' cx='" + number(frame.px(x)) + "' cy='" +
           number(frame.py(y)) + "'/>";
  }
  return svg;
}

std::string opened(double height, const std::string& title) {
  return "<svg viewBox='0 0 " + number(kWidth) + " " + number(height) + "' role='img'><title>" +
         escaped(title) + "</title>" + text_at(kLeft, 18, "start", title, "class='title'");
}

// Names in the order of the series, in rows below the plot.
std::string legend(const std::vector<Series>& series) {
  std::string svg;
  constexpr double kColumn = (kWidth - kLeft) / 2, kRow = 18;
  for (size_t i = 0; i < series.size(); ++i) {
    const double x = kLeft + static_cast<double>(i % 2) * kColumn;
    const double y = kHeight + 10 + static_cast<double>(i / 2) * kRow;
    svg += "<rect width='14' height='4' x='" + number(x) + "' y='" + number(y - 6) + "' fill='" +
           kColors[i % std::size(kColors)] + "'/>" + text_at(x + 20, y, "start", series[i].name);
  }
  return svg;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : one_line(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '\'':
        result += "&#39;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string line_plot(const std::string& title, const Axis& x, const Axis& y,
                      const std::vector<Series>& series) {
  if (std::all_of(series.begin(), series.end(), [](const Series& s) { return s.points.empty(); })) return "";
  const Frame frame{scale_of(x, series, true), scale_of(y, series, false)};
  const double rows = std::ceil(static_cast<double>(series.size()) / 2);
  std::string svg = opened(kHeight + 12 + 18 * rows, title) + frame.axes(x, y);
  for (size_t i = 0; i < series.size(); ++i) {
    svg += drawn(series[i], frame, kColors[i % std::size(kColors)]);
  }
  return svg + legend(series) + "</svg>\n";
}

std::string bar_plot(const std::string& title, const std::vector<Bar>& bars, double end, bool mark_one) {
  if (bars.empty()) return "";
  constexpr double kRow = 20, kLabels = 390, kTexts = 50;
  const double height = kTop + kRow * static_cast<double>(bars.size()) + 10;
  const auto length = [&](double value) { return value / end * (kWidth - kLabels - kTexts); };
  std::string svg = opened(height, title);
  if (mark_one) svg += line_from(kLabels + length(1), kTop, kLabels + length(1), height - 8, "class='mark'");
  double y = kTop;
  for (const Bar& bar : bars) {
    svg += text_at(kLabels - 8, y + 13, "end", bar.label);
    svg += "<rect height='14' x='" + number(kLabels) + "' y='" + number(y + 2) + "' width='" +
           number(length(bar.value)) + "' fill='" + kColors[bar.color % std::size(kColors)] + "'/>";
    svg += text_at(kLabels + length(bar.value) + 6, y + 13, "start", bar.text, "class='over'");
    y += kRow;
  }
  return svg + "</svg>\n";
}

}  // namespace attnspan::cli
