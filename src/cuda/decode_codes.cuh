#pragma once
// Rows of tbq4 and q8: how a step of them comes to shared memory, which bytes a lane reads, what they stand
// for.
//
// A step of a warp is 16 or 32 keys. Scores want pairs of neighbouring columns of a key (keys are the rows of
// the product), weighted sums pairs of columns of a value (they are its rows, one product for the even column
// of each pair and one for the odd): a byte of tbq4, and two of q8, is such a pair, and no value is ever
// moved between lanes. The order of columns is free, as long as queries and outputs follow it: each lane
// reads whole words.
//
// tbq4: a byte is looked up as two f16 centroids in a table that every lane has a column of (64 KB: entry b
// of lane l at 256 b + 4 l), so no two lanes ever meet in a bank: one byte permute makes the address, one
// 4-byte load brings two values. docs/decisions/0010 has the count. The table lies at a fixed address of the
// shared window, which the loads have as a constant: an addition each would be a fifth of all instructions.

#include "cuda/decode_store.cuh"

namespace attnspan::cuda {

// ---- words of shared memory

template <int kWords>
__device__ __forceinline__ void read_words(uint32_t (&x)[kWords], uint32_t at) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at));
  }
}

// ---- the formats: a word of codes as pairs of f16

// kTable: address of the table in the shared window.
template <int kDim_, int kTable>
struct Tbq4Codes {
  static constexpr int kDim = kDim_;
  static constexpr int kBlock = kDim < 128 ? kDim : 128;  // values under one scale
  static constexpr int kBlocks = kDim / kBlock;
  static constexpr int kBlockBytes = kBlock / 2;
  static constexpr int kRow = kDim / 2;  // bytes
  static constexpr int kPairs = 4;       // of a word

  // Byte i of the word: the even value in the low half. column: 4 x lane.
  __device__ static __forceinline__ uint32_t pair(uint32_t word, int i, uint32_t column) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1 + %2];"
                 : "=r"(x)
                 : "r"(__byte_perm(word, column, 0x7604 + 16 * i)), "n"(kTable));
    return x;
  }
};

template <int kDim_>
struct Q8Codes {
  static constexpr int kDim = kDim_;
  static constexpr int kBlock = 32;
  static constexpr int kBlocks = kDim / kBlock;
  static constexpr int kBlockBytes = kBlock;
  static constexpr int kRow = kDim;  // bytes
  static constexpr int kPairs = 2;

  // 1024 + (x + 128) is exact in f16, and so is the difference.
  __device__ static __forceinline__ uint32_t pair(uint32_t word, int i, uint32_t) {
    const uint32_t magic = __byte_perm(word ^ 0x80808080U, 0x64646464U, i == 0 ? 0x4140 : 0x4342);
    const __half2 x =
        __hsub2(*reinterpret_cast<const __half2*>(&magic), __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t*>(&x);
  }
};

template <typename Codes>
inline constexpr bool is_q8 = Codes::kPairs == 2;

// ---- which column

// The query's column in slot (k, side, 2 t + e) of the products' depth: lane t holds a quarter of each block.
template <typename Codes>
__device__ __forceinline__ int query_column(int k, int t, int side, int e) {
  constexpr int kSteps = Codes::kBlock / 16;
  return k / kSteps * Codes::kBlock + t * (Codes::kBlock / 4) + k % kSteps * 4 + 2 * side + e;
}

// The value's column behind half h (rows g and g + 8) of tile i of pairs, of which lane group g holds an
// eighth of each block; `odd`: the second column of the pair.
template <typename Codes>
__device__ __forceinline__ int value_column(int i, int h, int odd) {
  constexpr int kTiles = Codes::kBlock / 32;
  const int g = lane_index() / 4;
  return i / kTiles * Codes::kBlock + g * (Codes::kBlock / 8) + (2 * (i % kTiles) + h) * 2 + odd;
}

// ---- one step of a warp in shared memory: codes of keys, codes of values, scales of keys, scales of values

template <typename Keys, typename Values, int kGroups>
struct StepLayout {
  static constexpr int kKeys = 16 * kGroups;
  static constexpr int kValues = kKeys * Keys::kRow;
  static constexpr int kKeyScales = kValues + kKeys * Values::kRow;
  static constexpr int kValueScales = kKeyScales + kKeys * Keys::kBlocks * 2;
  // A slot of a ring also takes the warp's state of 8 query rows, when a split ends.
  static constexpr int kStep = kValueScales + kKeys * Values::kBlocks * 2;
  static constexpr int kState = 8 * (Keys::kDim + 4) * static_cast<int>(sizeof(float));
  static constexpr int kBytes = ((kStep > kState ? kStep : kState) + 127) / 128 * 128;
};

// Where byte `at` of a row lies among the rows' bytes. Lanes read rows g (keys) or 2 t + u (values) together:
// their parts are moved by 32 and 64 bytes so that they lie in different banks. Every bit is a sum of bits of
// row and at: code_offset(a ^ b, c ^ d) = code_offset(a, c) ^ code_offset(b, d).
template <int kRow>
__device__ __host__ constexpr uint32_t code_offset(int row, int at) {
  const int r0 = row & 1, r1 = row >> 1 & 1, r2 = row >> 2 & 1;
  const int moved = kRow == 32 ? 32 * r2 : (64 * (kRow == 64 ? r2 : r0 ^ r2) | 32 * r1);
  return static_cast<uint32_t>((row * kRow + at) ^ moved);
}

// ---- copies

// What a lane copies of a plane's codes: one chunk of 16 bytes of every kRows-th row. Strides fit 32 bits
// (plan_decode_kernel).
template <typename Codes>
struct CodeCopies {
  static constexpr int kChunks = Codes::kRow / 16, kRows = 32 / kChunks;
  const uint8_t* from = nullptr;  // the chunk of its first row, of the unit's first page
  uint32_t page_stride, token_stride;
  uint32_t to;

  __device__ __forceinline__ explicit CodeCopies(const KvPlane& plane)
      : page_stride(static_cast<uint32_t>(plane.page_stride)),
        token_stride(static_cast<uint32_t>(plane.token_stride)),
        to(kept(code_offset<Codes::kRow>(lane_index() / kChunks, lane_index() % kChunks * 16))) {}

  __device__ __forceinline__ void enter(const Params& p, const KvPlane& plane, const DecodeUnit& u) {
    const int64_t sequence = p.block_table == nullptr ? u.batch * plane.page_stride : 0;
    from = kept(plane.codes + u.kv_head * plane.head_stride + sequence +
                lane_index() / kChunks * plane.token_stride + lane_index() % kChunks * 16);
  }

  // 16 keys, of which the first `count` exist, to the rows from `codes` on.
  template <bool kWhole>
  __device__ __forceinline__ void copy(uint32_t codes, uint32_t page, uint32_t token, int count) const {
    const uint8_t* first = advance(advance(from, page, page_stride), token, token_stride);
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      if (kWhole || lane_index() / kChunks + i * kRows < count)
        copy_async_16(codes + (to ^ code_offset<Codes::kRow>(i * kRows, 0)),
                      advance(first, i * kRows, token_stride));
    }
  }
};

// Scales of neighbouring keys lie side by side: words of two. A lane copies every 32nd word of a step's,
// first those of keys, then those of values.
template <typename Keys, typename Values, int kGroups>
struct ScaleCopies {
  static constexpr int kKeyWords = 8 * Keys::kBlocks, kValueWords = 8 * Values::kBlocks;  // of 16 keys
  static constexpr int kWords = kGroups * (kKeyWords + kValueWords), kCopies = (kWords + 31) / 32;
  // Of each word: its place on the unit's first page, bytes between pages and keys, the key of the step.
  const uint16_t* from[kCopies];
  uint32_t page_stride[kCopies], token_stride[kCopies];
  int key[kCopies];

  __device__ __forceinline__ static int word_of(int i) { return 32 * i + lane_index(); }
  __device__ __forceinline__ static bool is_value(int i) { return word_of(i) >= kGroups * kKeyWords; }
  // Of a word among those of its own plane.
  __device__ __forceinline__ static int own_word(int i) {
    return is_value(i) ? word_of(i) - kGroups * kKeyWords : word_of(i);
  }

  __device__ __forceinline__ explicit ScaleCopies(const Params& p) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int blocks = is_value(i) ? Values::kBlocks : Keys::kBlocks;
      key[i] = word_of(i) < kWords ? 2 * own_word(i) / blocks : 0x7fffffff;  // of no step
      page_stride[i] =
          static_cast<uint32_t>(2 * (is_value(i) ? p.value.scale_page_stride : p.key.scale_page_stride));
      token_stride[i] = 2 * blocks;
    }
  }

  __device__ __forceinline__ void enter(const Params& p, const DecodeUnit& u) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int blocks = is_value(i) ? Values::kBlocks : Keys::kBlocks;
      const KvPlane& plane = is_value(i) ? p.value : p.key;
      const int64_t sequence = p.block_table == nullptr ? u.batch * plane.scale_page_stride : 0;
      from[i] = kept(plane.scales + u.kv_head * plane.scale_head_stride + sequence +
                     2 * (own_word(i) % (8 * blocks)));
    }
  }

  // scales: the step's of keys, the values' behind them.
  __device__ __forceinline__ void copy(uint32_t scales, const uint32_t (&pages)[kGroups],
                                       const uint32_t (&tokens)[kGroups], int count) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool first = key[i] < 16;
      const uint32_t page = first ? pages[0] : pages[kGroups - 1];
      const uint32_t token = first ? tokens[0] : tokens[kGroups - 1];
      if (key[i] < count) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(scales + 4 * word_of(i)),
                     "l"(advance(advance(from[i], page, page_stride[i]), token, token_stride[i]))
                     : "memory");
      }
    }
  }
};

// ---- one step in registers, for 16 keys

__device__ __forceinline__ float read_scale(uint32_t at) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
  return f16_bits_to_float(x);
}

// The part of a row that one lane uses: kParts lanes share a row, each the same part of every block.
template <typename Codes, int kParts>
struct RowPart {
  static constexpr int kWords = Codes::kBlockBytes / kParts / 4;
  uint32_t words[Codes::kBlocks][kWords];

  // stage: where the rows start; offset: code_offset of the row's part.
  __device__ __forceinline__ RowPart(uint32_t stage, uint32_t offset) {
#pragma unroll
    for (int block = 0; block < Codes::kBlocks; ++block)
      read_words(words[block], stage + (offset ^ code_offset<Codes::kRow>(0, block * Codes::kBlockBytes)));
  }
};

// Where a lane reads in a step: its part of key g and of values 2 t and 2 t + 1, the scales of key g, its
// column of the table.
template <typename Keys, typename Values>
struct LaneOffsets {
  uint32_t key, value[2], scale, column;

  __device__ __forceinline__ LaneOffsets() {
    const int g = lane_index() / 4, t = lane_index() & 3;
    key = kept(code_offset<Keys::kRow>(g, t * (Keys::kBlockBytes / 4)));
    for (int u = 0; u < 2; ++u)
      value[u] = kept(code_offset<Values::kRow>(2 * t + u, g * (Values::kBlockBytes / 8)));
    scale = kept(2 * g);
    column = kept(4 * lane_index());
  }
};

}  // namespace attnspan::cuda
