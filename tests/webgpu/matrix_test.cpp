// Subgroup matrices of the adapter at hand against double, in every way in which
// attention_forward_matrix.wgsl uses them: both orders of the right factor, padded strides, several
// subgroups, sums that pass through workgroup memory, and f16 values that come out of words.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "check/buffer.hpp"
#include "core/dtype.hpp"
#include "no_device.hpp"
#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

// out[SUBGROUPS * M x M] = a[SUBGROUPS * M x 2 M] . b[2 M x M], or . transpose of b[M x 2 M]
constexpr const char* kProduct = R"WGSL(
const ROWS = M * SUBGROUPS;
const STRIDE_A = 2u * M + PAD;
const STRIDE_B = select(M, 2u * M, TRANSPOSED) + PAD;
const STRIDE_OUT = M + 4u;
alias Left = subgroup_matrix_left<f16, M, M>;
alias Right = subgroup_matrix_right<f16, M, M>;
alias Sums = subgroup_matrix_result<f32, M, M>;
@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
var<workgroup> left: array<f16, ROWS * STRIDE_A>;
var<workgroup> right: array<f16, 2u * M * (2u * M + PAD)>;
var<workgroup> sums: array<f32, ROWS * STRIDE_OUT>;
fn half_of(words: vec4<u32>, i: u32) -> f16 {
  return f16(unpack2x16float(words[i >> 1u] >> (16u * (i & 1u))).x);
}
@compute @workgroup_size(SUBGROUP * SUBGROUPS)
fn product(@builtin(local_invocation_index) thread: u32) {
  for (var e = thread; e < ROWS * 2u * M; e += SUBGROUP * SUBGROUPS) {
    left[e / (2u * M) * STRIDE_A + e % (2u * M)] = half_of(a[e / 8u], e % 8u);
  }
  let columns = select(M, 2u * M, TRANSPOSED);
  for (var e = thread; e < 2u * M * M; e += SUBGROUP * SUBGROUPS) {
    right[e / columns * STRIDE_B + e % columns] = half_of(b[e / 8u], e % 8u);
  }
  workgroupBarrier();
  let own = thread / SUBGROUP * M;
  var c = Sums();
  for (var k = 0u; k < 2u; k++) {
    let x = subgroupMatrixLoad<Left>(&left, own * STRIDE_A + k * M, false, STRIDE_A);
    let first = select(k * M * STRIDE_B, k * M, TRANSPOSED);
    let y = subgroupMatrixLoad<Right>(&right, first, TRANSPOSED, STRIDE_B);
    c = subgroupMatrixMultiplyAccumulate(x, y, c);
    if (RELOADED) {
      subgroupMatrixStore(&sums, own * STRIDE_OUT, c, false, STRIDE_OUT);
      workgroupBarrier();
      c = subgroupMatrixLoad<Sums>(&sums, own * STRIDE_OUT, false, STRIDE_OUT);
      workgroupBarrier();
    }
  }
  subgroupMatrixStore(&sums, own * STRIDE_OUT, c, false, STRIDE_OUT);
  workgroupBarrier();
  for (var e = thread; e < ROWS * M; e += SUBGROUP * SUBGROUPS) { out[e] = sums[e / M * STRIDE_OUT + e % M]; }
}
)WGSL";

struct ProductCase {
  uint32_t subgroups, pad;
  bool transposed, reloaded;
};

class MatrixTest : public testing::TestWithParam<ProductCase> {};

std::string prelude_of(const Capabilities& c, const ProductCase& k) {
  const auto constant = [](const char* name, const std::string& value) {
    return std::string("const ") + name + " = " + value + ";\n";
  };
  return matrix_extensions() + constant("M", std::to_string(c.matrix) + "u") +
         constant("SUBGROUP", std::to_string(c.subgroup_min) + "u") +
         constant("SUBGROUPS", std::to_string(k.subgroups) + "u") +
         constant("PAD", std::to_string(k.pad) + "u") +
         constant("TRANSPOSED", k.transposed ? "true" : "false") +
         constant("RELOADED", k.reloaded ? "true" : "false");
}

TEST_P(MatrixTest, ProductIsRight) {
  std::string reason;
  const auto device = GpuDevice::open(reason);
  if (device == nullptr) ATTNSPAN_NO_DEVICE(reason);
  const Capabilities& caps = device->capabilities();
  if (caps.matrix == 0) GTEST_SKIP() << "no subgroup matrices of f16 with f32 sums";
  const ProductCase c = GetParam();
  const int64_t m = caps.matrix, rows = m * c.subgroups;
  check::Random random(17);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> a(static_cast<size_t>(rows * 2 * m)), b(static_cast<size_t>(2 * m * m));
  for (auto* values : {&a, &b}) {
    for (size_t i = 0; i < values->size(); ++i)
      store_f32(values->data(), static_cast<int64_t>(i), DType::f16, normal(random));
  }
  Pipelines pipelines(*device);
  Commands commands(*device);
  const WGPUBuffer left = commands.scratch(2 * a.size()), right = commands.scratch(2 * b.size());
  const WGPUBuffer out = commands.scratch(static_cast<uint64_t>(4 * rows * m));
  device->write(left, 0, a.data(), 2 * a.size());
  device->write(right, 0, b.data(), 2 * b.size());
  const Pipeline& pipeline = pipelines.make("product", prelude_of(caps, c) + kProduct, "product", {}, "urrw");
  const uint32_t no_params[4] = {};
  commands.dispatch(pipeline, no_params, sizeof(no_params), {{left}, {right}, {out}}, 1, 1, 1);
  commands.submit();
  std::vector<float> found(static_cast<size_t>(rows * m));
  device->read(out, 0, found.data(), 4 * found.size());
  double error = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < 2 * m; ++k)
        sum += static_cast<double>(load_f32(a.data(), i * 2 * m + k, DType::f16)) *
               load_f32(b.data(), c.transposed ? j * 2 * m + k : k * m + j, DType::f16);
      error = std::max(error, std::abs(sum - found[static_cast<size_t>(i * m + j)]));
    }
  }
  EXPECT_LT(error, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Ways, MatrixTest,
                         testing::Values(ProductCase{1, 0, false, false}, ProductCase{1, 0, true, false},
                                         ProductCase{1, 8, false, false}, ProductCase{1, 8, true, false},
                                         ProductCase{1, 8, true, true}, ProductCase{4, 8, false, false},
                                         ProductCase{4, 8, true, true}));

}  // namespace
}  // namespace attnspan::webgpu
