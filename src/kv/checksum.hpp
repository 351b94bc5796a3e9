#pragma once
// XXH3-64, in pieces. The values are part of the file format (docs/cache-file.md).

#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace attnspan {

class Checksum {
 public:
  Checksum() { XXH3_64bits_reset(&state_); }
  void update(const void* bytes, int64_t count) {
    if (count > 0) XXH3_64bits_update(&state_, bytes, static_cast<size_t>(count));
  }
  uint64_t value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

}  // namespace attnspan
