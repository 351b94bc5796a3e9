// Every available backend on the vectors of tools/make_golden.py: the contract as an independent
// implementation computed it. Their inputs are exact in all three dtypes, so each vector is three tests.

#include <gtest/gtest.h>

#include <filesystem>

#include "check/compare.hpp"
#include "check/plain.hpp"
#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "io/safetensors.hpp"
#include "registry/registry.hpp"

namespace attnspan {
namespace {

using check::Buffer;

struct GoldenParam {
  std::string phase, backend, name;
  DType dtype = DType::f32;
};

void PrintTo(const GoldenParam& param, std::ostream* os) { *os << param.name << " on " << param.backend; }

std::string path_of(const std::string& name) {
  return std::string(ATTNSPAN_GOLDEN_FOLDER) + "/" + name + ".safetensors";
}

Diagonal parse_diagonal(const std::string& text) {
  if (text == "top-left") return Diagonal::top_left();
  return text == "bottom-right" ? Diagonal::bottom_right() : Diagonal::at(std::stoll(text));
}

// One vector in one dtype.
class Golden {
 public:
  Golden(const std::string& name, DType dtype)
      : path_(path_of(name)), dtype_(dtype), header_(io::read_safetensors_header(path_)) {
    for (const auto& [option, text] : header_.metadata) set_option(option, text);
    options_.key_start = keep("key_start");
    options_.key_end = keep("key_end");
    options_.cu_seqlens_q = keep("cu_seqlens_q");
    options_.cu_seqlens_k = keep("cu_seqlens_k");
    options_.bias = keep("bias");
    options_.alibi_slopes = keep("alibi");
    options_.sinks = keep("sinks");
  }

  bool has(const std::string& tensor) const { return header_.tensors.count(tensor) != 0; }

  // The tensor's values in `dtype`.
  Buffer load(const std::string& tensor, DType dtype) const {
    const io::TensorBuffer stored = io::read_safetensors(path_, tensor);
    Buffer buffer = Buffer::poisoned(stored.shape(), dtype);
    const int64_t n = buffer.tensor().numel();
    for (int64_t i = 0; i < n; ++i) buffer.set(i, load_f32(stored.data(), i, stored.dtype()));
    return buffer;
  }
  Tensor keep(const std::string& tensor) {  // a side input, as stored
    if (!has(tensor)) return {};
    return sides_.emplace_back(io::read_safetensors(path_, tensor)).view();
  }
  Tensor keep_in_dtype(const std::string& tensor) {
    return rows_.emplace_back(load(tensor, dtype_)).tensor();
  }

  ForwardArgs forward_args(const Buffer& out, const Buffer& lse) {
    ForwardArgs args;
    args.query = keep_in_dtype("query");
    args.key = keep_in_dtype("key");
    args.value = keep_in_dtype("value");
    args.out = out.tensor();
    args.lse = lse.tensor();
    args.options = options_;
    return args;
  }
  BackwardArgs backward_args(const Buffer& dq, const Buffer& dk, const Buffer& dv, const Buffer& d_sinks) {
    BackwardArgs args;
    args.query = keep_in_dtype("query");
    args.key = keep_in_dtype("key");
    args.value = keep_in_dtype("value");
    args.out = keep_in_dtype("out");
    args.dout = keep_in_dtype("dout");
    args.lse = keep("lse");
    args.dlse = keep("dlse");
    args.dq = dq.tensor();
    args.dk = dk.tensor();
    args.dv = dv.tensor();
    if (has("d_sinks")) args.d_sinks = d_sinks.tensor();
    args.options = options_;
    return args;
  }

  std::vector<int64_t> shape(const std::string& tensor) const { return header_.tensors.at(tensor).shape; }

 private:
  void set_option(const std::string& option, const std::string& text) {
    if (option == "causal") {
      options_.causal = text == "true";
    } else if (option == "window") {
      options_.window_left = std::stoll(text);
      options_.window_right = std::stoll(text.substr(text.find(',') + 1));
    } else if (option == "softcap") {
      options_.softcap = std::stof(text);
    } else if (option == "scale") {
      options_.softmax_scale = std::stof(text);
    } else if (option == "diagonal") {
      options_.diagonal = parse_diagonal(text);
    } else {
      ADD_FAILURE() << "unknown option " << option;
    }
  }

  std::string path_;
  DType dtype_;
  io::SafetensorsHeader header_;
  AttentionOptions options_;
  std::vector<io::TensorBuffer> sides_;
  std::vector<Buffer> rows_;
};

class GoldenTest : public testing::TestWithParam<GoldenParam> {
 protected:
  void SetUp() override { execution_.backend = GetParam().backend; }

  void expect_close(const Golden& golden, const std::string& name, const Buffer& found, const Buffer& plain,
                    DType dtype) {
    const check::Comparison c = check::compare(name, found, golden.load(name, DType::f32), plain, dtype);
    EXPECT_TRUE(c.ok) << c.message;
  }

  Execution execution_;
};

class GoldenForward : public GoldenTest {};

TEST_P(GoldenForward, Agrees) {
  const DType dtype = GetParam().dtype;
  Golden golden(GetParam().name, dtype);
  const Buffer out = Buffer::poisoned(golden.shape("out"), dtype),
               plain_out = Buffer::poisoned(golden.shape("out"), dtype);
  const Buffer lse = Buffer::poisoned(golden.shape("lse"), DType::f32),
               plain_lse = Buffer::poisoned(golden.shape("lse"), DType::f32);
  forward(golden.forward_args(out, lse), execution_);
  check::plain_forward(make_problem(golden.forward_args(plain_out, plain_lse)));
  expect_close(golden, "out", out, plain_out, dtype);
  expect_close(golden, "lse", lse, plain_lse, DType::f32);
}

class GoldenBackward : public GoldenTest {};

struct Gradients {
  Gradients(const Golden& golden, DType dtype)
      : dq(Buffer::poisoned(golden.shape("query"), dtype)),
        dk(Buffer::poisoned(golden.shape("key"), dtype)),
        dv(Buffer::poisoned(golden.shape("value"), dtype)) {
    if (golden.has("d_sinks")) d_sinks = Buffer::poisoned(golden.shape("d_sinks"), DType::f32);
  }
  Buffer dq, dk, dv, d_sinks;
};

TEST_P(GoldenBackward, Agrees) {
  const DType dtype = GetParam().dtype;
  Golden golden(GetParam().name, dtype);
  const Gradients found(golden, dtype), plain(golden, dtype);
  backward(golden.backward_args(found.dq, found.dk, found.dv, found.d_sinks), execution_);
  check::plain_backward(make_problem(golden.backward_args(plain.dq, plain.dk, plain.dv, plain.d_sinks)));
  expect_close(golden, "dq", found.dq, plain.dq, dtype);
  expect_close(golden, "dk", found.dk, plain.dk, dtype);
  expect_close(golden, "dv", found.dv, plain.dv, dtype);
  if (golden.has("d_sinks")) expect_close(golden, "d_sinks", found.d_sinks, plain.d_sinks, DType::f32);
}

std::vector<std::string> names(bool with_gradients) {
  std::vector<std::string> list;
  for (const auto& entry : std::filesystem::directory_iterator(ATTNSPAN_GOLDEN_FOLDER)) {
    if (entry.path().extension() != ".safetensors") continue;
    const io::SafetensorsHeader header = io::read_safetensors_header(entry.path());
    if (!with_gradients || header.tensors.count("dq") != 0) list.push_back(entry.path().stem());
  }
  std::sort(list.begin(), list.end());
  return list;
}

std::vector<GoldenParam> params(const std::string& phase) {
  std::vector<GoldenParam> list;
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend == nullptr) continue;
    for (const std::string& name : names(phase == "backward")) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
        list.push_back({phase, entry.name, name, dtype});
    }
  }
  return list;
}

std::string name_of_param(const testing::TestParamInfo<GoldenParam>& info) {
  const GoldenParam& p = info.param;
  return p.phase + "_" + p.backend + "_" + p.name + "_" + name_of(p.dtype);
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenForward, testing::ValuesIn(params("forward")), name_of_param);
INSTANTIATE_TEST_SUITE_P(Golden, GoldenBackward, testing::ValuesIn(params("backward")), name_of_param);

}  // namespace
}  // namespace attnspan
