// Bad input: one line that names the flag and the file, what was found and what was expected; exit status 2;
// no output file, whole or partial.

#include "command.hpp"

namespace attnspan::cli_test {
namespace {

using testing::HasSubstr;

// Good tensors: 4 heads over 2 KV heads, 5 queries, 7 keys, head_dim 8.
void write_good_files(const TempFolder& folder) {
  save(folder.file("q.npy"), random_tensor(DType::f32, {1, 5, 4, 8}, 1));
  save(folder.file("k.npy"), random_tensor(DType::f32, {1, 7, 2, 8}, 2));
  save(folder.file("v.npy"), random_tensor(DType::f32, {1, 7, 2, 8}, 3));
  save(folder.file("do.npy"), random_tensor(DType::f32, {1, 5, 4, 8}, 4));
  save(folder.file("pq.npy"), random_tensor(DType::f32, {5, 4, 8}, 5));
  save(folder.file("pk.npy"), random_tensor(DType::f32, {7, 2, 8}, 6));
  save(folder.file("cuq.npy"), int_tensor({0, 2, 5}));
  save(folder.file("cuk.npy"), int_tensor({0, 3, 7}));
  save(folder.file("sinks.npy"), random_tensor(DType::f32, {4}, 7));
  save(folder.file("b.safetensors:q"), random_tensor(DType::bf16, {1, 5, 4, 8}, 8));
}

// Tensors that contradict the good ones.
void write_wrong_tensors(const TempFolder& folder) {
  save(folder.file("q3.npy"), random_tensor(DType::f32, {5, 4, 8}, 1));
  save(folder.file("q_heads3.npy"), random_tensor(DType::f32, {1, 5, 3, 8}, 1));
  save(folder.file("q_dim600.npy"), random_tensor(DType::f32, {1, 5, 4, 600}, 1));
  save(folder.file("q_heads0.npy"), random_tensor(DType::f32, {1, 5, 0, 8}, 1));
  save(folder.file("q_f16.npy"), random_tensor(DType::f16, {1, 5, 4, 8}, 1));
  save(folder.file("q_i32.npy"), random_tensor(DType::i32, {1, 5, 4, 8}, 1));
  save(folder.file("k_dim9.npy"), random_tensor(DType::f32, {1, 7, 2, 9}, 1));
  save(folder.file("k_batch2.npy"), random_tensor(DType::f32, {2, 7, 2, 8}, 1));
  save(folder.file("v_len6.npy"), random_tensor(DType::f32, {1, 6, 2, 8}, 1));
  save(folder.file("v_heads1.npy"), random_tensor(DType::f32, {1, 7, 1, 8}, 1));
  save(folder.file("do_len4.npy"), random_tensor(DType::f32, {1, 4, 4, 8}, 1));
  save(folder.file("bias_heads3.npy"), random_tensor(DType::f32, {1, 3, 5, 7}, 1));
  save(folder.file("sinks3.npy"), random_tensor(DType::f32, {3}, 1));
  save(folder.file("cu_starts_1.npy"), int_tensor({1, 2, 5}));
  save(folder.file("cu_falls.npy"), int_tensor({0, 6, 5}));
  save(folder.file("cu_short.npy"), int_tensor({0, 2, 4}));
  save(folder.file("cu_3.npy"), int_tensor({0, 1, 2, 7}));
  save(folder.file("cu_f32.npy"), random_tensor(DType::f32, {3}, 1));
  save(folder.file("start_falls.npy"), int_tensor({0, 1, 2, 1, 3}));
  save(folder.file("start4.npy"), int_tensor({0, 0, 0, 0}));
  save(folder.file("used8.npy"), int_tensor({8}));
}

std::string npy_bytes(const std::string& dictionary, const std::string& data) {
  std::string header = dictionary + "\n";
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + data;
}

// Files that are not what they say.
void write_broken_files(const TempFolder& folder) {
  const std::string good = read_all(folder.file("q.npy"));
  write_all(folder.file("cut.npy"), good.substr(0, good.size() - 1));
  write_all(folder.file("cut_header.npy"), good.substr(0, 40));
  write_all(folder.file("long.npy"), good + "x");
  write_all(folder.file("empty.npy"), "");
  write_all(folder.file("text.npy"), "query = 1, 2, 3\n");
  write_all(folder.file("objects.npy"),
            npy_bytes("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "12345678"));
  write_all(folder.file("huge.npy"),
            npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4, 8), }",
                      "1234"));
  write_all(folder.file("lies.npy"),
            npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 99999, 4, 8), }", "1234"));
  const auto safetensors = [&](const std::string& name, const std::string& json, const std::string& data) {
    std::string prefix(8, '\0');
    prefix[0] = static_cast<char>(json.size());
    write_all(folder.file(name), prefix + json + data);
  };
  safetensors("cut.safetensors", R"({"q":{"dtype":"F32","shape":[1,5,4,8],"data_offsets":[0,640]}})", "1234");
  safetensors("lies.safetensors", R"({"q":{"dtype":"F32","shape":[1,5,4,9],"data_offsets":[0,4]}})", "1234");
  safetensors("ints.safetensors", R"({"q":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", "12345678");
  safetensors("nojson.safetensors", R"({"q":)", "");
  write_all(folder.file("length.safetensors"), std::string(8, '\xff') + "{}");
  std::filesystem::create_directory(folder.file("folder.npy"));
}

struct BadInput {
  const char* arguments;  // after "run"; % is the folder
  const char* names;      // the flag and the file, as the message has them
  const char* found;
  const char* expected;
};

void PrintTo(const BadInput& bad, std::ostream* os) { *os << bad.arguments; }

#define GOOD_Q "--q %q.npy "
#define GOOD_KV "--k %k.npy --v %v.npy "
#define GOOD GOOD_Q GOOD_KV
#define OUT "--out %o.npy "
#define PACKED "--q %pq.npy --k %pk.npy --v %pk.npy "

const BadInput kTable[] = {
    // files
    {"--q %missing.npy " GOOD_KV OUT, "--q %missing.npy", "No such file", "cannot be read"},
    {"--q %folder.npy " GOOD_KV OUT, "--q %folder.npy", "no regular file", ""},
    {"--q q.txt " GOOD_KV OUT, "--q q.txt", "is neither", "FILE.npy nor FILE.safetensors:TENSOR"},
    {"--q %b.safetensors " GOOD_KV OUT, "--q %b.safetensors", "several tensors", "FILE.safetensors:TENSOR"},
    {"--q %b.safetensors:x " GOOD_KV OUT, "--q %b.safetensors:x", "no tensor 'x'", "it holds 'q'"},
    {"--q %cut.npy " GOOD_KV OUT, "--q %cut.npy", "the file has 639", "needs 640 bytes"},
    {"--q %cut_header.npy " GOOD_KV OUT, "--q %cut_header.npy", "the file has 40", "truncated"},
    {"--q %long.npy " GOOD_KV OUT, "--q %long.npy", "the file has 641", "needs 640 bytes"},
    {"--q %empty.npy " GOOD_KV OUT, "--q %empty.npy", "is no .npy file", "NUMPY"},
    {"--q %text.npy " GOOD_KV OUT, "--q %text.npy", "is no .npy file", "NUMPY"},
    {"--q %objects.npy " GOOD_KV OUT, "--q %objects.npy", "Python objects", "expected f32"},
    {"--q %huge.npy " GOOD_KV OUT, "--q %huge.npy", "[4294967296, 4294967296, 4, 8]",
     "more bytes than can be counted"},
    {"--q %lies.npy " GOOD_KV OUT, "--q %lies.npy", "the file has 4", "needs 12799872 bytes"},
    {"--q %cut.safetensors:q " GOOD_KV OUT, "--q %cut.safetensors:q", "'q'", "640"},
    {"--q %lies.safetensors:q " GOOD_KV OUT, "--q %lies.safetensors:q", "'q'", "720"},
    {"--q %ints.safetensors:q " GOOD_KV OUT, "--q %ints.safetensors:q", "'I64'",
     "expected F32, F16, BF16 or I32"},
    {"--q %nojson.safetensors:q " GOOD_KV OUT, "--q %nojson.safetensors:q", "JSON", ""},
    {"--q %length.safetensors:q " GOOD_KV OUT, "--q %length.safetensors:q", "18446744073709551615",
     "truncated"},
    // tensors
    {"--q %q3.npy " GOOD_KV OUT, "--q %q3.npy", "rank 3 [5, 4, 8]", "rank 4 ([batch, seqlen, heads, dim])"},
    {"--layout bhsd --q %q3.npy " GOOD_KV OUT, "--q %q3.npy", "rank 3",
     "rank 4 ([batch, heads, seqlen, dim])"},
    {"--q %q_heads3.npy " GOOD_KV OUT, "--q %q_heads3.npy", "3 heads over 2 KV heads", "a multiple of"},
    {"--q %q_heads0.npy " GOOD_KV OUT, "--q %q_heads0.npy", "0 heads over 2 KV heads", "a multiple of"},
    {"--q %q_dim600.npy " GOOD_KV OUT, "--q %q_dim600.npy", "head dim 600", "1 to 576"},
    {"--q %q_f16.npy " GOOD_KV OUT, "--k %k.npy", "f32", "expected f16"},
    {"--q %q_i32.npy " GOOD_KV OUT, "--q %q_i32.npy", "int32", "f32, f16 or bf16"},
    {GOOD_Q "--k %k_dim9.npy --v %v.npy " OUT, "--k %k_dim9.npy", "[1, 7, 2, 9]", "[1, any, any, 8]"},
    {GOOD_Q "--k %k_batch2.npy --v %v.npy " OUT, "--k %k_batch2.npy", "[2, 7, 2, 8]", "[1, any, any, 8]"},
    {GOOD_Q "--k %k.npy --v %v_len6.npy " OUT, "--v %v_len6.npy", "[1, 6, 2, 8]", "[1, 7, 2, any]"},
    {GOOD_Q "--k %k.npy --v %v_heads1.npy " OUT, "--v %v_heads1.npy", "[1, 7, 1, 8]", "[1, 7, 2, any]"},
    {GOOD "--dout %do_len4.npy --dq %dq.npy", "--dout %do_len4.npy", "[1, 4, 4, 8]", "[1, 5, 4, 8]"},
    // side inputs
    {GOOD OUT "--bias %bias_heads3.npy", "--bias %bias_heads3.npy", "extent 3 in dimension 1", "4 or 1"},
    {GOOD OUT "--bias %cuq.npy", "--bias %cuq.npy", "int32", "f32"},
    {GOOD OUT "--sinks %sinks3.npy", "--sinks %sinks3.npy", "[3]", "[4] (heads)"},
    {GOOD OUT "--alibi %sinks3.npy", "--alibi %sinks3.npy", "[3]", "[4] (heads)"},
    {GOOD OUT "--key-start %start_falls.npy", "--key-start %start_falls.npy", "entry 3 = 1 after 2",
     "never decrease"},
    {GOOD OUT "--key-end %start4.npy", "--key-end %start4.npy", "[4]", "[5] (seqlen_q)"},
    {GOOD OUT "--key-end %sinks.npy", "--key-end %sinks.npy", "f32", "int32"},
    {GOOD OUT "--seqused-k %used8.npy", "--seqused-k %used8.npy", "8 for sequence 0", "0 to seqlen_k = 7"},
    // packed sequences
    {PACKED OUT "--cu-seqlens-q %cuq.npy", "--cu-seqlens-k", "no tensor", "both"},
    {PACKED OUT "--cu-seqlens-q %cu_starts_1.npy --cu-seqlens-k %cuk.npy", "--cu-seqlens-q %cu_starts_1.npy",
     "first entry 1", "expected 0"},
    {PACKED OUT "--cu-seqlens-q %cu_falls.npy --cu-seqlens-k %cuk.npy", "--cu-seqlens-q %cu_falls.npy",
     "entry 2 = 5 after 6", "never decrease"},
    {PACKED OUT "--cu-seqlens-q %cu_short.npy --cu-seqlens-k %cuk.npy", "--cu-seqlens-q %cu_short.npy",
     "last entry 4", "expected 5"},
    {PACKED OUT "--cu-seqlens-q %cuq.npy --cu-seqlens-k %cu_3.npy", "--cu-seqlens-k %cu_3.npy", "[4]", "[3]"},
    {PACKED OUT "--cu-seqlens-q %cu_f32.npy --cu-seqlens-k %cuk.npy", "--cu-seqlens-q %cu_f32.npy", "f32",
     "int32"},
    {GOOD OUT "--cu-seqlens-q %cuq.npy --cu-seqlens-k %cuk.npy", "--q %q.npy", "rank 4 [1, 5, 4, 8]",
     "rank 3 ([total, heads, dim], because cu-seqlens are given)"},
    {PACKED OUT "--cu-seqlens-q %cuq.npy --cu-seqlens-k %cuk.npy --layout bhsd", "--layout", "found bhsd",
     "packed"},
    {PACKED OUT "--cu-seqlens-q %cuq.npy --cu-seqlens-k %cuk.npy --bias %q.npy", "--bias %q.npy",
     "together with", "one"},
    // numbers
    {GOOD OUT "--window 5", "--window", "'5'", "LEFT,RIGHT"},
    {GOOD OUT "--window -2,0", "--window (left)", "'-2'", "-1 or more"},
    {GOOD OUT "--window 3,x", "--window (right)", "'x'", "an integer"},
    {GOOD OUT "--diagonal middle", "--diagonal", "'middle'", "bottom-right, top-left or an integer"},
    {GOOD OUT "--diagonal 9223372036854775807", "--diagonal", "9223372036854775807", "fits"},
    {GOOD OUT "--diagonal -9223372036854775808", "--diagonal", "-9223372036854775808", "fits"},
    {GOOD OUT "--softcap -1", "--softcap", "-1", "a positive number"},
    {GOOD OUT "--softcap nan", "--softcap", "nan", "a positive number"},
    {GOOD OUT "--softcap 3x", "--softcap", "'3x'", "a number"},
    {GOOD OUT "--scale inf", "--scale", "inf", "a finite number"},
    {GOOD OUT "--scale 0", "--scale", "found 0", "0"},
    {GOOD OUT "--threads -1", "--threads", "'-1'", "from 0 to 4096"},
    {GOOD OUT "--layout shbd", "--layout", "'shbd'", "bshd|bhsd"},
    {GOOD OUT "--backend gpu", "--backend", "'gpu'", "reference"},
    {GOOD OUT "--backend metal", "--backend metal", "metal is not available", "macOS"},
    // outputs
    {GOOD, "--out", "no output", "at least one of --out"},
    {GOOD "--out %missing/o.npy", "--out %missing/o.npy", "No such file", "cannot be written"},
    {GOOD "--out %folder.npy", "--out %folder.npy", "no regular file", "may be replaced"},
    {GOOD OUT "--lse %o.npy", "--lse %o.npy", "is named for two outputs", ""},
    {GOOD "--out %o.safetensors:a --lse %./o.safetensors:b", "--lse %./o.safetensors:b",
     "is the same file as", "spell both alike"},
    {"--q %b.safetensors:q --k %b.safetensors:q --v %b.safetensors:q " OUT, "--out %o.npy", "bf16",
     "FILE.safetensors:TENSOR"},
    {GOOD OUT "--dq %dq.npy", "--dq %dq.npy", "no --dout", "one"},
    {GOOD OUT "--dout %do.npy", "--dout %do.npy", "no gradient to write", "at least one of --dq"},
    {GOOD OUT "--dout %do.npy --d-sinks %ds.npy", "--d-sinks %ds.npy", "no --sinks", "one"},
    {GOOD OUT "--probs %p.npy --backend cpu", "--backend cpu", "probs", "reference"},
    // the command line itself
    {"--k %k.npy --v %v.npy " OUT, "--q", "", "is required"},
    {GOOD OUT "--causl", "--causl", "not expected", ""},
    {GOOD OUT "extra", "extra", "not expected", ""},
    {GOOD "--out", "--out", "", "1 required"},
};

// One folder for all: a command that fails leaves it as it was.
class BadInputTest : public testing::TestWithParam<BadInput> {
 protected:
  static const TempFolder& folder() {
    static const TempFolder folder;
    static const bool filled = [] {
      write_good_files(folder);
      write_wrong_tensors(folder);
      write_broken_files(folder);
      return true;
    }();
    EXPECT_TRUE(filled);
    return folder;
  }
};

std::string with_folder(std::string text, const TempFolder& folder) {
  const size_t at = text.find('%');
  return at == std::string::npos ? text : text.replace(at, 1, folder.file(""));
}

TEST_P(BadInputTest, OneLineAndNoOutput) {
  const BadInput& bad = GetParam();
  const std::vector<std::string> before = folder().names();
  const Outcome outcome = run_command(folder(), std::string("run ") + bad.arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_THAT(outcome.err, testing::StartsWith("attnspan"));
  EXPECT_THAT(outcome.err, HasSubstr(with_folder(bad.names, folder())));
  EXPECT_THAT(outcome.err, HasSubstr(bad.found));
  EXPECT_THAT(outcome.err, HasSubstr(bad.expected));
  EXPECT_EQ(folder().names(), before);
}

INSTANTIATE_TEST_SUITE_P(Run, BadInputTest, testing::ValuesIn(kTable));

}  // namespace
}  // namespace attnspan::cli_test
