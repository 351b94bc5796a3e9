#include "print.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace attnspan::cli {

std::string one_line(const std::string& text) {
  std::string line = text;
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = c == '\n' ? ' ' : '?';
  }
  return line;
}

std::string text_of(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string text_of_seconds(double seconds) {
  if (seconds >= 1) return text_of(seconds, 2) + " s";
  if (seconds >= 1e-3) return text_of(seconds * 1e3, 2) + " ms";
  return text_of(seconds * 1e6, 1) + " us";
}

std::string text_of_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
  return text_of(bytes, unit == 0 ? 0 : 2) + " " + units[unit];
}

Table::Table(std::string alignment, std::vector<std::string> head) : alignment_(std::move(alignment)) {
  add(std::move(head));
}

void Table::add(std::vector<std::string> row) {
  row.resize(alignment_.size());
  rows_.push_back(std::move(row));
}

void Table::print() const {
  std::vector<size_t> width(alignment_.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(width[i] - row[i].size(), ' ');
      line += i == 0 ? "" : "  ";
      line += alignment_[i] == 'r' ? padding + row[i] : row[i] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  }
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (terminal_) std::fputs("\r\033[K", stderr);
}

void Progress::show(const std::string& text) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
}

}  // namespace attnspan::cli
