#include "kv/format.hpp"

#include <array>
#include <string>

#include "attnspan/error.hpp"
#include "core/dtype.hpp"
#include "kv/formats.hpp"

namespace attnspan {
namespace {

constexpr const KvFormatOps* kFormats[] = {&kF32Ops, &kF16Ops, &kBf16Ops, &kQ8Ops, &kTbq4Ops};

constexpr float kMaxF16 = 65504.0F;

}  // namespace

const KvFormatOps& ops_of(KvFormat format) {
  for (const KvFormatOps* ops : kFormats) {
    if (ops->format == format) return *ops;
  }
  throw Error(ErrorCode::invalid_argument, "format",
              "found " + std::to_string(static_cast<int>(format)) + ", expected " + kKvFormatNames);
}

const char* name_of(KvFormat format) { return ops_of(format).name; }

std::optional<KvFormat> parse_kv_format(std::string_view name) {
  for (const KvFormatOps* ops : kFormats) {
    if (name == ops->name) return ops->format;
  }
  return std::nullopt;
}

uint16_t scale_to_f16(float scale, int64_t& saturated) {
  if (0 <= scale && scale <= kMaxF16) return f16_from_f32(scale);
  ++saturated;
  return f16_from_f32(kMaxF16);
}

void decode_row(const KvFormatOps& ops, const uint8_t* codes, const uint16_t* scales, int64_t dim,
                float* values) {
  if (!ops.rotated) {
    ops.decode_stored_row(codes, scales, dim, values);
    return;
  }
  std::array<float, kMaxStoredDim> stored;
  ops.decode_stored_row(codes, scales, dim, stored.data());
  ops.leave_domain(stored.data(), dim, values);
}

}  // namespace attnspan
