// f32, f16 and bf16: the values themselves, rounded to nearest even. No scales, no other domain.

#include <cstring>

#include "core/dtype.hpp"
#include "kv/formats.hpp"

namespace attnspan {
namespace {

int64_t no_scales(int64_t) { return 0; }
int64_t same_dim(int64_t dim) { return dim; }

template <DType dtype>
int64_t row_code_bytes(int64_t dim) {
  return dim * size_of(dtype);
}

template <DType dtype>
int64_t encode_row(const float* values, int64_t dim, EncodeMode, uint8_t* codes, uint16_t*) {
  for (int64_t i = 0; i < dim; ++i) store_f32(codes, i, dtype, values[i]);
  return 0;
}

template <DType dtype>
void decode_row(const uint8_t* codes, const uint16_t*, int64_t dim, float* values) {
  for (int64_t i = 0; i < dim; ++i) values[i] = load_f32(codes, i, dtype);
}

template <DType dtype>
constexpr KvFormatOps plain_ops(KvFormat format, const char* name) {
  return {format,
          name,
          false,
          row_code_bytes<dtype>,
          no_scales,
          same_dim,
          encode_row<dtype>,
          decode_row<dtype>,
          copy_row,
          copy_row};
}

}  // namespace

void copy_row(const float* from, int64_t dim, float* to) {
  std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
}

const KvFormatOps kF32Ops = plain_ops<DType::f32>(KvFormat::f32, "f32");
const KvFormatOps kF16Ops = plain_ops<DType::f16>(KvFormat::f16, "f16");
const KvFormatOps kBf16Ops = plain_ops<DType::bf16>(KvFormat::bf16, "bf16");

}  // namespace attnspan
