#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "attnspan/error.hpp"

namespace attnspan::io {

MappedFile::MappedFile(const std::string& path) {
  const auto fail = [&](const std::string& what) { throw Error(ErrorCode::io, path, what); };
  const auto fail_by_errno = [&] { fail(std::string("cannot be read: ") + std::strerror(errno)); };
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail_by_errno();
  struct stat status {};
  const bool known = fstat(descriptor, &status) == 0;
  if (known && !S_ISREG(status.st_mode)) {
    close(descriptor);
    fail("is no regular file");
  }
  size_ = known ? status.st_size : 0;
  void* memory = nullptr;
  if (known && size_ > 0) {
    // Private: what a cache writes to its pages stays in this process.
    memory = mmap(nullptr, static_cast<size_t>(size_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                  descriptor, 0);
  }
  const int error = errno;
  close(descriptor);
  errno = error;
  if (!known || memory == MAP_FAILED) fail_by_errno();
  if (size_ == 0) return;
  const auto length = static_cast<size_t>(size_);
  memory_ = {static_cast<std::byte*>(memory), [length](std::byte* address) { munmap(address, length); }};
}

}  // namespace attnspan::io
