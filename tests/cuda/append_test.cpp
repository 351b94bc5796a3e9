// append() on the device writes the bytes that src/kv writes on the host: every format, rows of zeros,
// outliers and values beyond f16's range among them.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "attnspan/device_cache.hpp"
#include "kv/format.hpp"

namespace attnspan {
namespace {

constexpr int64_t kBatch = 2, kTokens = 37, kHeads = 3, kPageSize = 16, kPages = 3 * kBatch;

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* data = nullptr;
  EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), values.size() * sizeof(T) + 16), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  return data;
}

struct AppendCase {
  KvFormat format;
  int64_t dim;
  EncodeMode mode;
};

class CudaAppend : public testing::TestWithParam<AppendCase> {};

std::vector<float> random_rows(int64_t dim) {
  std::mt19937_64 random(static_cast<uint64_t>(dim));
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(kBatch * kTokens * kHeads * dim));
  for (float& v : values) v = normal(random);
  for (int64_t i = 0; i < dim; ++i) {
    values[i] = 0;                                       // a row of zeros
    values[dim + i] = i == 3 ? 50.0F : values[dim + i];  // an outlier
    values[2 * dim + i] *= 1e7F;                         // scales beyond f16
    values[3 * dim + i] *= 1e-6F;                        // scales that f16 holds as subnormals
  }
  return values;
}

TEST_P(CudaAppend, SameBytesAsTheHost) {
  const auto [format, dim, mode] = GetParam();
  const KvFormatOps& ops = ops_of(format);
  const std::vector<float> values = random_rows(dim);
  const int64_t row = (ops.row_code_bytes(dim) + 15) / 16 * 16, scales = ops.row_scales(dim);
  const std::vector<int32_t> table = {4, 0, 5, 2, 1, 3}, start = {5, 0}, counter = {0};
  std::vector<uint8_t> expected(static_cast<size_t>(kPages * kHeads * kPageSize * row), 0xee);
  std::vector<uint16_t> expected_scales(static_cast<size_t>(kPages * kHeads * kPageSize * scales) + 1,
                                        0xeeee);
  KvView view;
  view.device = Device::cuda;
  view.batch = kBatch;
  view.kv_heads = kHeads;
  view.page_size = kPageSize;
  view.num_pages = kPages;
  view.max_seqlen = 3 * kPageSize;
  KvRows& key = view.key;
  key.format = format;
  key.dim = dim;
  key.token_stride = row;
  key.head_stride = row * kPageSize;
  key.page_stride = key.head_stride * kHeads;
  key.scale_token_stride = scales;
  key.scale_head_stride = scales * kPageSize;
  key.scale_page_stride = key.scale_head_stride * kHeads;
  key.codes = on_device(expected);
  key.scales = scales > 0 ? on_device(expected_scales) : nullptr;
  view.value = key;  // values are keys: one plane to compare
  int32_t* device_table = on_device(table);
  view.block_table = contiguous(device_table, DType::i32, {kBatch, 3}, Device::cuda);
  int32_t* device_start = on_device(start);
  int32_t* device_counter = on_device(counter);
  float* device_values = on_device(values);

  DeviceAppendArgs args;
  args.cache = &view;
  args.key = contiguous(device_values, DType::f32, {kBatch, kTokens, kHeads, dim}, Device::cuda);
  args.start = contiguous(device_start, DType::i32, {kBatch}, Device::cuda);
  args.encode_mode = mode;
  args.saturated = contiguous(device_counter, DType::i32, {1}, Device::cuda);
  append(args, {.backend = "cuda"});

  int64_t saturated = 0;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t position = start[b] + t;
      const int64_t place = table[b * 3 + position / kPageSize] * kHeads * kPageSize + position % kPageSize;
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t at = place + h * kPageSize;
        saturated += ops.encode_row(values.data() + ((b * kTokens + t) * kHeads + h) * dim, dim, mode,
                                    expected.data() + at * row, expected_scales.data() + at * scales);
      }
    }
  }
  std::vector<uint8_t> found(expected.size());
  std::vector<uint16_t> found_scales(expected_scales.size(), 0xeeee);
  int32_t count = -1;
  ASSERT_EQ(cudaMemcpy(found.data(), key.codes, found.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  if (scales > 0) {
    ASSERT_EQ(cudaMemcpy(found_scales.data(), key.scales, found_scales.size() * 2, cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  ASSERT_EQ(cudaMemcpy(&count, device_counter, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(found_scales, expected_scales);
  size_t different = 0;
  for (size_t i = 0; i < found.size(); ++i) different += found[i] != expected[i] ? 1 : 0;
  EXPECT_EQ(different, 0U) << "of " << found.size() << " bytes";
  EXPECT_EQ(count, saturated);
  for (void* p : {key.codes, key.scales, static_cast<void*>(device_table), static_cast<void*>(device_start),
                  static_cast<void*>(device_counter), static_cast<void*>(device_values)}) {
    cudaFree(p);
  }
}

std::vector<AppendCase> cases() {
  std::vector<AppendCase> list;
  for (const int64_t dim : {64, 100, 128, 192, 576}) {
    for (const KvFormat format :
         {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8, KvFormat::tbq4}) {
      list.push_back({format, dim, EncodeMode::quality});
    }
    list.push_back({KvFormat::tbq4, dim, EncodeMode::fast});
  }
  return list;
}
INSTANTIATE_TEST_SUITE_P(Formats, CudaAppend, testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(name_of(info.param.format)) + "_" + std::to_string(info.param.dim) +
         (info.param.mode == EncodeMode::fast ? "_fast" : "");
});

}  // namespace
}  // namespace attnspan
