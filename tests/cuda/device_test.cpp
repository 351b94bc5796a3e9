// What the grid can't see: device pointers and the caller's stream, captured graphs over growing caches, the
// same bits from run to run and in any batch, views that span more than 2^31 elements, nan_guard's count.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attnspan/attention.hpp"
#include "core/dtype.hpp"

namespace attnspan {
namespace {

void ok(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// Memory on the device and, for tests, its bytes.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    ok(cudaMalloc(&data_, bytes));
    ok(cudaMemset(data_, 0xff, bytes));  // NaN in every dtype
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  void write(const void* from, size_t bytes, size_t offset = 0) {
    ok(cudaMemcpy(static_cast<char*>(data_) + offset, from, bytes, cudaMemcpyHostToDevice));
  }
  std::vector<char> read() const {
    std::vector<char> copy(bytes_);
    ok(cudaMemcpy(copy.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

std::vector<uint16_t> random_values(size_t count, DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& v : values)
    v = dtype == DType::f16 ? f16_from_f32(normal(random)) : bf16_from_f32(normal(random));
  return values;
}

// A random [batch, rows, heads, dim] tensor of 16-bit values.
struct Input {
  Input(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim, uint64_t seed)
      : values(random_values(static_cast<size_t>(batch * rows * heads * dim), dtype, seed)),
        memory(values.size() * 2),
        tensor(bshd(memory.data(), dtype, batch, rows, heads, dim, Device::cuda)) {
    memory.write(values.data(), values.size() * 2);
  }
  std::vector<uint16_t> values;
  Memory memory;
  Tensor tensor;
};

const Execution kCuda{.backend = "cuda"};

Tensor lse_of(const Memory& memory, int64_t batch, int64_t heads, int64_t rows) {
  return contiguous(memory.data(), DType::f32, {batch, heads, rows}, Device::cuda);
}

class CudaRepeats : public testing::TestWithParam<int64_t> {};

TEST_P(CudaRepeats, ForwardAndBackwardGiveTheSameBits) {
  const int64_t dim = GetParam(), rows = 321, heads = 4;
  const Input q(DType::bf16, 2, rows, heads, dim, 1), k(DType::bf16, 2, rows, 2, dim, 2),
      v(DType::bf16, 2, rows, 2, dim, 3), dout(DType::bf16, 2, rows, heads, dim, 4);
  const size_t bytes = q.values.size() * 2, kv_bytes = k.values.size() * 2;
  const Memory out(bytes), lse(2 * heads * rows * 4), dq(bytes), dk(kv_bytes), dv(kv_bytes);
  ForwardArgs forward_args{.query = q.tensor, .key = k.tensor, .value = v.tensor};
  forward_args.out = bshd(out.data(), DType::bf16, 2, rows, heads, dim, Device::cuda);
  forward_args.lse = lse_of(lse, 2, heads, rows);
  forward_args.options.causal = true;
  BackwardArgs args;
  args.query = q.tensor;
  args.key = k.tensor;
  args.value = v.tensor;
  args.out = forward_args.out;
  args.lse = forward_args.lse;
  args.dout = dout.tensor;
  args.dq = bshd(dq.data(), DType::bf16, 2, rows, heads, dim, Device::cuda);
  args.dk = bshd(dk.data(), DType::bf16, 2, rows, 2, dim, Device::cuda);
  args.dv = bshd(dv.data(), DType::bf16, 2, rows, 2, dim, Device::cuda);
  args.options = forward_args.options;
  std::vector<std::vector<char>> first;
  for (int run = 0; run < 100; ++run) {
    forward(forward_args, kCuda);
    backward(args, kCuda);
    std::vector<std::vector<char>> results;
    for (const Memory* m : {&out, &lse, &dq, &dk, &dv}) results.push_back(m->read());
    if (run == 0) first = results;
    ASSERT_EQ(results, first) << "run " << run;
  }
}
INSTANTIATE_TEST_SUITE_P(HeadDims, CudaRepeats, testing::Values(64, 72, 128, 256));

// One decode over a dense cache of given lengths; returns out.
std::vector<char> decode(const Input& q, const Input& k, const Input& v,
                         const std::vector<int32_t>& lengths) {
  Memory seqlens(lengths.size() * 4);
  seqlens.write(lengths.data(), lengths.size() * 4);
  const KvView cache = dense_cache(
      k.tensor, v.tensor,
      contiguous(seqlens.data(), DType::i32, {static_cast<int64_t>(lengths.size())}, Device::cuda));
  const Memory out(q.values.size() * 2);
  ForwardArgs args{.query = q.tensor, .cache = &cache};
  args.out = q.tensor;
  args.out.data = out.data();
  args.options.causal = true;
  forward(args, kCuda);
  return out.read();
}

TEST(CudaDecode, ASequenceGivesTheSameBitsAloneAndInABatch) {
  const int64_t heads = 8, kv_heads = 2, dim = 128, longest = 5000;
  const std::vector<int32_t> lengths = {5000, 1, 0, 777, 4096};
  const auto batch = static_cast<int64_t>(lengths.size());
  const Input q(DType::f16, batch, 1, heads, dim, 5), k(DType::f16, batch, longest, kv_heads, dim, 6),
      v(DType::f16, batch, longest, kv_heads, dim, 7);
  const std::vector<char> together = decode(q, k, v, lengths);
  const size_t row = static_cast<size_t>(heads * dim * 2),
               plane = static_cast<size_t>(longest * kv_heads * dim);
  for (size_t b = 0; b < lengths.size(); ++b) {
    Input alone_q(DType::f16, 1, 1, heads, dim, 0), alone_k(DType::f16, 1, longest, kv_heads, dim, 0),
        alone_v(DType::f16, 1, longest, kv_heads, dim, 0);
    alone_q.memory.write(q.values.data() + b * heads * dim, row);
    alone_k.memory.write(k.values.data() + b * plane, plane * 2);
    alone_v.memory.write(v.values.data() + b * plane, plane * 2);
    const std::vector<char> alone = decode(alone_q, alone_k, alone_v, {lengths[b]});
    EXPECT_EQ(std::memcmp(alone.data(), together.data() + b * row, row), 0) << "length " << lengths[b];
  }
}

TEST(CudaDecode, ACapturedGraphServesAGrowingCache) {
  const int64_t heads = 8, kv_heads = 2, dim = 128, longest = 3000;
  const Input q(DType::bf16, 1, 1, heads, dim, 8), k(DType::bf16, 1, longest, kv_heads, dim, 9),
      v(DType::bf16, 1, longest, kv_heads, dim, 10);
  Memory seqlens(4);
  const Memory out(static_cast<size_t>(heads * dim * 2));
  const KvView cache =
      dense_cache(k.tensor, v.tensor, contiguous(seqlens.data(), DType::i32, {1}, Device::cuda));
  ForwardArgs args{.query = q.tensor, .cache = &cache};
  args.out = bshd(out.data(), DType::bf16, 1, 1, heads, dim, Device::cuda);
  args.options.causal = true;
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Execution execution = kCuda;
  execution.stream = stream;
  const Memory workspace(workspace_bytes(args, execution));
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace_bytes(args, execution);
  int32_t length = 1;
  seqlens.write(&length, 4);
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  forward(args, execution);
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t instance = nullptr;
  ok(cudaGraphInstantiate(&instance, graph, 0));
  for (const int32_t now : {1, 17, 1000, 3000}) {
    seqlens.write(&now, 4);
    ok(cudaGraphLaunch(instance, stream));
    ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(out.read(), decode(q, k, v, {now})) << "length " << now;
  }
  cudaGraphExecDestroy(instance);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Values that are the first columns of their keys give what a copy of them gives.
TEST(CudaDecode, ValuesMayBeTheFirstColumnsOfKeys) {
  const int64_t batch = 4, heads = 16, dim = 576, dim_v = 512, longest = 700;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Input k(dtype, batch, longest, 1, dim, 30);
    std::vector<uint16_t> columns;
    for (int64_t row = 0; row < batch * longest; ++row)
      columns.insert(columns.end(), k.values.begin() + row * dim, k.values.begin() + row * dim + dim_v);
    Memory copy(columns.size() * 2), seqlens(4 * batch);
    copy.write(columns.data(), columns.size() * 2);
    const int32_t lengths[4] = {700, 1, 0, 333};
    seqlens.write(lengths, sizeof(lengths));
    for (const int64_t rows : {1, 3}) {
      const Input q(dtype, batch, rows, heads, dim, 31);
      std::vector<std::vector<char>> results;
      for (const bool shared : {true, false}) {
        Tensor value = bshd(copy.data(), dtype, batch, longest, 1, dim_v, Device::cuda);
        if (shared) {
          value = k.tensor;
          value.shape[3] = dim_v;
        }
        const KvView cache =
            dense_cache(k.tensor, value, contiguous(seqlens.data(), DType::i32, {batch}, Device::cuda));
        const Memory out(static_cast<size_t>(batch * rows * heads * dim_v * 2));
        ForwardArgs args{.query = q.tensor, .cache = &cache};
        args.out = bshd(out.data(), dtype, batch, rows, heads, dim_v, Device::cuda);
        args.options.causal = true;
        args.options.window_left = rows == 1 ? -1 : 300;
        forward(args, kCuda);
        results.push_back(out.read());
      }
      for (size_t i = 0; i < results[0].size(); i += 2) {
        uint16_t x = 0, y = 0;
        std::memcpy(&x, results[0].data() + i, 2);
        std::memcpy(&y, results[1].data() + i, 2);
        const float found = dtype == DType::f16 ? f32_from_f16(x) : f32_from_bf16(x);
        const float expected = dtype == DType::f16 ? f32_from_f16(y) : f32_from_bf16(y);
        ASSERT_NEAR(found, expected, (dtype == DType::f16 ? 0.001 : 0.008) * (1 + std::fabs(expected)))
            << i / 2 << " of " << rows << " rows";
      }
    }
  }
}

// Two batch entries more than 2^31 elements apart give what neighbours give.
TEST(CudaForward, ViewsBeyondTwoToThe31Elements) {
  const int64_t rows = 200, heads = 2, dim = 128, apart = (int64_t{1} << 31) + 4096;
  const size_t plane = static_cast<size_t>(rows * heads * dim);
  const Input q(DType::bf16, 2, rows, heads, dim, 11), k(DType::bf16, 2, rows, heads, dim, 12),
      v(DType::bf16, 2, rows, heads, dim, 13);
  Memory far_k((static_cast<size_t>(apart) + plane) * 2), far_v((static_cast<size_t>(apart) + plane) * 2);
  Tensor key = k.tensor, value = v.tensor;
  for (size_t b = 0; b < 2; ++b) {
    far_k.write(k.values.data() + b * plane, plane * 2, b * static_cast<size_t>(apart) * 2);
    far_v.write(v.values.data() + b * plane, plane * 2, b * static_cast<size_t>(apart) * 2);
  }
  key.data = far_k.data();
  value.data = far_v.data();
  key.stride[0] = value.stride[0] = apart;
  for (const float softcap : {0.0F, 30.0F}) {
    for (const int64_t used : {int64_t{1}, rows}) {  // decode, and forward
      const Memory near_out(q.values.size() * 2), far_out(q.values.size() * 2);
      ForwardArgs args{.query = q.tensor, .key = k.tensor, .value = v.tensor};
      args.query.shape[1] = used;
      args.out = args.query;
      args.out.data = near_out.data();
      args.options.softcap = softcap;
      forward(args, kCuda);
      args.key = key;
      args.value = value;
      args.out.data = far_out.data();
      forward(args, kCuda);
      EXPECT_EQ(near_out.read(), far_out.read()) << used << " rows, softcap " << softcap;
    }
  }
}

TEST(CudaForward, NanGuardCountsWhatItReplaces) {
  Input q(DType::f16, 1, 64, 1, 64, 14), k(DType::f16, 1, 64, 1, 64, 15), v(DType::f16, 1, 64, 1, 64, 16);
  const uint16_t nan = 0x7e00;
  v.memory.write(&nan, 2);  // column 0 of every row becomes NaN
  const Memory out(64 * 64 * 2);
  ForwardArgs args{.query = q.tensor, .key = k.tensor, .value = v.tensor};
  args.out = bshd(out.data(), DType::f16, 1, 64, 1, 64, Device::cuda);
  args.options.nan_guard = true;
  EXPECT_EQ(forward(args, kCuda).nonfinite_replaced, 64);
  const std::vector<char> bytes = out.read();
  for (size_t i = 0; i < bytes.size() / 2; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    ASSERT_TRUE(std::isfinite(f32_from_f16(bits))) << i;
  }
}

TEST(CudaForward, ASmallWorkspaceIsRefused) {
  const Input q(DType::f16, 1, 1, 8, 128, 17), k(DType::f16, 1, 9000, 1, 128, 18),
      v(DType::f16, 1, 9000, 1, 128, 19);
  const Memory out(8 * 128 * 2), workspace(256);
  ForwardArgs args{.query = q.tensor, .key = k.tensor, .value = v.tensor};
  args.out = bshd(out.data(), DType::f16, 1, 1, 8, 128, Device::cuda);
  Execution execution = kCuda;
  execution.workspace = workspace.data();
  execution.workspace_bytes = 256;
  try {
    forward(args, execution);
    FAIL() << "256 bytes were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "workspace_bytes");
  }
}

TEST(CudaMerge, JoinsTwoHalves) {
  const Input q(DType::bf16, 1, 40, 2, 64, 20), k(DType::bf16, 1, 100, 2, 64, 21),
      v(DType::bf16, 1, 100, 2, 64, 22);
  const size_t bytes = q.values.size() * 2;
  const Memory whole(bytes), a(bytes), b(bytes), lse(320), lse_a(320), lse_b(320);
  const auto attend = [&](int64_t begin, int64_t end, const Memory& out, const Memory& log_sum) {
    ForwardArgs args{.query = q.tensor, .key = k.tensor, .value = v.tensor};
    for (Tensor* t : {&args.key, &args.value}) {
      t->byte_offset = begin * t->stride[1] * 2;
      t->shape[1] = end - begin;
    }
    args.out = bshd(out.data(), DType::bf16, 1, 40, 2, 64, Device::cuda);
    args.lse = lse_of(log_sum, 1, 2, 40);
    forward(args, kCuda);
  };
  attend(0, 100, whole, lse);
  attend(0, 37, a, lse_a);
  attend(37, 100, b, lse_b);
  MergeArgs args;
  args.out_a = args.out = bshd(a.data(), DType::bf16, 1, 40, 2, 64, Device::cuda);
  args.out_b = bshd(b.data(), DType::bf16, 1, 40, 2, 64, Device::cuda);
  args.lse_a = args.lse = lse_of(lse_a, 1, 2, 40);
  args.lse_b = lse_of(lse_b, 1, 2, 40);
  merge_states(args, kCuda);
  const std::vector<char> expected = whole.read(), found = a.read();
  for (size_t i = 0; i < expected.size() / 2; ++i) {
    uint16_t x = 0, y = 0;
    std::memcpy(&x, expected.data() + 2 * i, 2);
    std::memcpy(&y, found.data() + 2 * i, 2);
    ASSERT_NEAR(f32_from_bf16(x), f32_from_bf16(y), 0.01)
        << i;  // parts were rounded to bf16 (2^-8 of values below 2)
  }
}

}  // namespace
}  // namespace attnspan
