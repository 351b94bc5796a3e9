#pragma once
// tbq4: 4-bit rotated blocks (docs/kv-formats.md). A block of B = 128 or 64 values x is stored as B codes of
// 4 bits and one f16 norm; with y = H(s * x) / sqrt(B), a decoded y[i] is norm * kCentroids[code[i]]. Byte j
// of the codes holds value 2j in its low nibble and value 2j + 1 in its high one.

#include <cstdint>

#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"

namespace attnspan::tbq4 {

// values[dim] -> stored[padded_dim(dim)]: y of every block. Also how a query is rotated: always in f32.
void rotate_row(const float* values, int64_t dim, float* stored);
// The inverse: x = s * H(y) / sqrt(B) of every block, the padding dropped.
void unrotate_row(const float* stored, int64_t dim, float* values);

// y[block] -> codes[block / 2] and the f16 norm. The scalar definition that the SIMD encoder equals bit for
// bit. Returns 1 where the norm saturated, else 0.
int64_t encode_rotated_block(const float* y, int64_t block, EncodeMode mode, uint8_t* codes, uint16_t* norm);

// KvFormatOps::encode_row by that definition.
int64_t encode_row(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes, uint16_t* norms);

// The interleaved layout of other engines: per block an f16 scale = norm * sqrt(B) beside centroids /
// sqrt(B), then the codes: 66 bytes for B = 128, 34 for B = 64. Both return how many scales left the range of
// f16.
constexpr int64_t interleaved_block_bytes(int64_t block) { return 2 + block / 2; }
int64_t export_interleaved(const uint8_t* codes, const uint16_t* norms, int64_t dim, uint8_t* interleaved);
int64_t import_interleaved(const uint8_t* interleaved, int64_t dim, uint8_t* codes, uint16_t* norms);

}  // namespace attnspan::tbq4
