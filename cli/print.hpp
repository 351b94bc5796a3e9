#pragma once
// What the subcommands print with: tables, numbers with units, progress on a terminal.

#include <cstdint>
#include <string>
#include <vector>

namespace attnspan::cli {

// `text` without line breaks and control characters: names of files may hold anything.
std::string one_line(const std::string& text);

std::string text_of_seconds(double seconds);  // "3.21 ms"
std::string text_of_bytes(double bytes);      // "1.25 MiB"
std::string text_of(double value, int digits);

// Columns as wide as their widest cell. `alignment` has one letter per column, l or r.
class Table {
 public:
  Table(std::string alignment, std::vector<std::string> head);
  void add(std::vector<std::string> row);
  void print() const;  // to standard output

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;
};

// One line on standard error that is rewritten as work goes on and gone at the end; nothing in a pipe.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text);

 private:
  bool terminal_;
};

}  // namespace attnspan::cli
