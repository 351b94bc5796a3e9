// append() into a Metal cache: keys and values, each against the host's encoder of its format.

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "attnspan/device_cache.hpp"
#include "check/buffer.hpp"
#include "core/dtype.hpp"
#include "emulated_device.hpp"
#include "kv/format.hpp"
#include "registry/registry.hpp"

namespace attnspan::metal_emulation {
namespace {

using check::Buffer;
using check::Random;

constexpr int64_t kBatch = 2, kTokens = 21, kHeads = 2, kPageSize = 16, kPages = 5;
constexpr int32_t kTable[kBatch][2] = {{2, 0}, {3, 1}};  // page 4 belongs to nobody
constexpr int32_t kStart[kBatch] = {5, 43};
constexpr int32_t kFirst[kBatch] = {0, 32};  // the second sequence has recycled two pages
constexpr int32_t kEarlier = 7;              // scales that saturated in earlier calls

// Device memory that lives as long as this.
class Uploads {
 public:
  explicit Uploads(DeviceMemory& memory) : memory_(memory) {}
  ~Uploads() {
    for (void* buffer : buffers_) memory_.release(buffer);
  }
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;
  void* put(const void* from, size_t bytes) {
    buffers_.push_back(memory_.allocate(bytes));
    memory_.upload(buffers_.back(), from, bytes);
    return buffers_.back();
  }

 private:
  DeviceMemory& memory_;
  std::vector<void*> buffers_;
};

// The rows to append to one side of a cache, and the memory of its pages.
struct Side {
  Side(KvFormat format_of_rows, int64_t dim_of_rows, uint64_t seed)
      : format(format_of_rows),
        dim(dim_of_rows),
        row_bytes(ops_of(format).row_code_bytes(dim)),
        row_scales(ops_of(format).row_scales(dim)),
        rows(Buffer::poisoned({kBatch, kTokens, kHeads, dim}, DType::f32)),
        codes(static_cast<size_t>(kPages * kHeads * kPageSize * row_bytes), 0xee),
        scales(static_cast<size_t>(kPages * kHeads * kPageSize * row_scales), 0xeeee) {
    Random random(seed);
    rows.fill_normal(random);
    rows.set(dim, 1e9F);                                                  // one scale saturates
    for (int64_t d = 0; d < dim; ++d) rows.set(2 * kHeads * dim + d, 0);  // and one row is zero
  }

  Tensor upload_rows(Uploads& uploads) const {
    const Tensor& host = rows.tensor();
    return contiguous(uploads.put(host.data, static_cast<size_t>(host.numel() * 4)), DType::f32,
                      {kBatch, kTokens, kHeads, dim}, Device::metal);
  }
  KvRows upload_pages(Uploads& uploads) const {
    KvRows pages;
    pages.format = format;
    pages.dim = dim;
    pages.codes = uploads.put(codes.data(), codes.size());
    pages.token_stride = row_bytes;
    pages.head_stride = kPageSize * row_bytes;
    pages.page_stride = kHeads * pages.head_stride;
    if (row_scales == 0) return pages;
    pages.scales = uploads.put(scales.data(), scales.size() * 2);
    pages.scale_token_stride = row_scales;
    pages.scale_head_stride = kPageSize * row_scales;
    pages.scale_page_stride = kHeads * pages.scale_head_stride;
    return pages;
  }
  void download_pages(DeviceMemory& memory, const KvRows& pages) {
    memory.download(codes.data(), pages.codes, codes.size());
    if (row_scales > 0) memory.download(scales.data(), pages.scales, scales.size() * 2);
  }

  // At most 1 code in 1000 differs and no other row is touched; returns how many scales saturate.
  int64_t expect_encoded(EncodeMode mode) const {
    const KvFormatOps& ops = ops_of(format);
    int64_t saturated = 0, different = 0;
    std::vector<bool> touched(codes.size(), false);
    std::vector<float> row(static_cast<size_t>(dim));
    std::vector<uint8_t> expected(static_cast<size_t>(row_bytes));
    std::vector<uint16_t> expected_scales(static_cast<size_t>(row_scales) + 1);
    for (int64_t i = 0; i < kBatch * kTokens * kHeads; ++i) {
      const int64_t b = i / (kTokens * kHeads), h = i % kHeads;
      const int64_t slot = kStart[b] - kFirst[b] + i / kHeads % kTokens;
      const int64_t place = (kTable[b][slot / kPageSize] * kHeads + h) * kPageSize + slot % kPageSize;
      for (int64_t d = 0; d < dim; ++d) row[d] = rows.get(i * dim + d);
      saturated += ops.encode_row(row.data(), dim, mode, expected.data(), expected_scales.data());
      for (int64_t j = 0; j < row_bytes; ++j) {
        different += codes[place * row_bytes + j] != expected[j] ? 1 : 0;
        touched[place * row_bytes + j] = true;
      }
      for (int64_t j = 0; j < row_scales; ++j) {
        const float scale = f32_from_f16(expected_scales[j]);
        EXPECT_NEAR(f32_from_f16(scales[place * row_scales + j]), scale, 1e-3F * scale);
      }
    }
    EXPECT_LE(different * 1000, kBatch * kTokens * kHeads * row_bytes);
    for (size_t i = 0; i < codes.size(); ++i) {
      if (!touched[i] && codes[i] != 0xee) ADD_FAILURE() << "byte " << i << " belongs to another row";
    }
    return saturated;
  }

  KvFormat format;
  int64_t dim, row_bytes, row_scales;
  Buffer rows;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
};

// A view without its planes. Start has a stride of two.
KvView upload_tables(Uploads& uploads, DeviceAppendArgs& args) {
  KvView view;
  view.device = Device::metal;
  view.batch = kBatch;
  view.kv_heads = kHeads;
  view.page_size = kPageSize;
  view.num_pages = kPages;
  view.max_seqlen = 64;
  view.block_table = contiguous(uploads.put(kTable, sizeof kTable), DType::i32, {kBatch, 2}, Device::metal);
  view.first_position = contiguous(uploads.put(kFirst, sizeof kFirst), DType::i32, {kBatch}, Device::metal);
  const int32_t spread[] = {kStart[0], -1, kStart[1]};
  args.start = contiguous(uploads.put(spread, sizeof spread), DType::i32, {kBatch}, Device::metal);
  args.start.stride[0] = 2;
  return view;
}

class AppendTest : public testing::TestWithParam<std::tuple<KvFormat, int64_t, EncodeMode>> {};

// Values are tbq4 in 64 dimensions beside keys of every kind. The schedule is the one that finds most.
TEST_P(AppendTest, WritesTheBytesOfTheFormats) {
  const auto [format, dim, mode] = GetParam();
  const BackendOrReason metal = metal::make_backend(make_emulated_device(emu::Schedule::skewed));
  ASSERT_NE(metal.backend, nullptr) << metal.reason;
  DeviceMemory& memory = *metal.backend->memory();
  Uploads uploads(memory);
  Side key(format, dim, 5), value(KvFormat::tbq4, 64, 6);
  DeviceAppendArgs args;
  KvView view = upload_tables(uploads, args);
  view.key = key.upload_pages(uploads);
  view.value = value.upload_pages(uploads);
  args.cache = &view;
  args.key = key.upload_rows(uploads);
  args.value = value.upload_rows(uploads);
  args.encode_mode = mode;
  args.saturated = contiguous(uploads.put(&kEarlier, 4), DType::i32, {1}, Device::metal);
  metal.backend->append(args, {});

  key.download_pages(memory, view.key);
  value.download_pages(memory, view.value);
  int32_t saturated = 0;
  memory.download(&saturated, args.saturated.data, 4);
  const int64_t of_keys = key.expect_encoded(mode), of_values = value.expect_encoded(mode);
  EXPECT_EQ(saturated, kEarlier + of_keys + of_values);
  EXPECT_GT(of_values, 0);
}

INSTANTIATE_TEST_SUITE_P(Metal, AppendTest,
                         testing::Combine(testing::Values(KvFormat::f32, KvFormat::f16, KvFormat::bf16,
                                                          KvFormat::q8, KvFormat::tbq4),
                                          testing::Values(40, 64, 128, 192, 256),
                                          testing::Values(EncodeMode::quality, EncodeMode::fast)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == EncodeMode::fast ? "_fast" : "");
                         });

// The public function, where values are the first of the key and nobody counts saturated scales.
TEST(MetalAppend, SharedRowsWithoutACounter) {
  DeviceMemory& memory = *select_backend(Device::metal, "metal").memory();
  Uploads uploads(memory);
  Side key(KvFormat::q8, 192, 7);
  DeviceAppendArgs args;
  KvView view = upload_tables(uploads, args);
  view.key = view.value = key.upload_pages(uploads);
  view.value.dim = 128;
  args.cache = &view;
  args.key = key.upload_rows(uploads);
  append(args, {.backend = "metal"});
  key.download_pages(memory, view.key);
  EXPECT_GT(key.expect_encoded(EncodeMode::quality), 0);
}

// No rows: nothing is written.
TEST(MetalAppend, NoTokens) {
  DeviceMemory& memory = *select_backend(Device::metal, "metal").memory();
  Uploads uploads(memory);
  Side key(KvFormat::f16, 40, 8);
  DeviceAppendArgs args;
  KvView view = upload_tables(uploads, args);
  view.key = view.value = key.upload_pages(uploads);
  args.cache = &view;
  args.key = key.upload_rows(uploads);
  args.key.shape[1] = 0;
  append(args, {.backend = "metal"});
  key.download_pages(memory, view.key);
  for (const uint8_t byte : key.codes) ASSERT_EQ(byte, 0xee);
}

}  // namespace
}  // namespace attnspan::metal_emulation
