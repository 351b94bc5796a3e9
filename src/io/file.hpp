#pragma once
// Files with errors that name them. Output is written beside its destination and renamed over it, so a
// reader, a crash or a full disk never meets half a file.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>

namespace attnspan::io {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// A file opened for reading. Every failure throws Error(io, path, ...).
class InputFile {
 public:
  explicit InputFile(std::string path);
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  void read_at(int64_t offset, void* to, int64_t bytes);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  int64_t size_ = 0;
};

// A file that appears under its name on commit() and leaves nothing behind without it.
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  void write(const void* from, int64_t bytes);
  void flush();   // to the disk; every error of writing shows here at the latest
  void commit();  // after flush(): renames

 private:
  std::string path_;
  std::string beside_;  // empty once committed
  std::unique_ptr<std::FILE, CloseFile> file_;
};

}  // namespace attnspan::io
