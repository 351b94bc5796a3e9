#include "io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "attnspan/error.hpp"

namespace attnspan::io {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::io, path, what + ": " + std::strerror(errno));
}

// So that the new name survives a loss of power too. The file is whole either way, and some file systems have
// nothing to sync for a folder, so a failure is none of the caller's.
void sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  fsync(descriptor);
  close(descriptor);
}

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "rb")) {
  if (!file_) fail(path_, "cannot be read");
  struct stat status {};
  if (fstat(fileno(file_.get()), &status) != 0) fail(path_, "cannot be read");
  if (!S_ISREG(status.st_mode)) throw Error(ErrorCode::io, path_, "is no regular file");
  size_ = status.st_size;
}

void InputFile::read_at(int64_t offset, void* to, int64_t bytes) {
  if (fseeko(file_.get(), offset, SEEK_SET) != 0) fail(path_, "cannot be read");
  if (bytes != 0 &&
      std::fread(to, 1, static_cast<size_t>(bytes), file_.get()) != static_cast<size_t>(bytes)) {
    if (std::ferror(file_.get()) != 0) fail(path_, "cannot be read");
    throw Error(ErrorCode::io, path_, "became shorter while it was read");
  }
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  if (stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::io, path_, "is no regular file; expected a file that may be replaced");
  }
  // Unique within the process and between processes, and in the same folder, so that rename() is atomic.
  static std::atomic<int> counter{0};
  beside_ = path_ + ".part-" + std::to_string(getpid()) + "-" + std::to_string(counter++);
  const int descriptor = open(beside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    beside_.clear();
    fail(path_, "cannot be written");
  }
  file_.reset(fdopen(descriptor, "wb"));
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      beside_(std::exchange(other.beside_, {})),
      file_(std::move(other.file_)) {}

OutputFile::~OutputFile() {
  if (!beside_.empty()) unlink(beside_.c_str());
}

void OutputFile::write(const void* from, int64_t bytes) {
  if (bytes == 0) return;
  if (std::fwrite(from, 1, static_cast<size_t>(bytes), file_.get()) != static_cast<size_t>(bytes)) {
    fail(path_, "cannot be written");
  }
}

void OutputFile::flush() {
  if (std::fflush(file_.get()) != 0 || fsync(fileno(file_.get())) != 0) fail(path_, "cannot be written");
}

void OutputFile::commit() {
  if (std::rename(beside_.c_str(), path_.c_str()) != 0) fail(path_, "cannot be written");
  beside_.clear();
  sync_folder_of(path_);
}

}  // namespace attnspan::io
