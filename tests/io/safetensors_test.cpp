// safetensors: the golden vectors are files of the original Python package; the others lie.

#include "io/safetensors.hpp"

#include <gmock/gmock.h>

#include "io/temp_folder.hpp"

namespace attnspan::io {
namespace {

using testing::HasSubstr;

std::string file_with(const std::string& json, const std::string& data = "") {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return bytes + json + data;
}

const char* const kGood = R"({"__metadata__":{"made":"by hand"},)"
                          R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                          R"("b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]},)"
                          R"("c":{"dtype":"I64","shape":[1],"data_offsets":[14,22]},)"
                          R"("scalar":{"dtype":"F32","shape":[],"data_offsets":[22,26]}}  )";

TEST(Safetensors, ReadsOneTensorOfMany) {
  TempFolder folder;
  const float values[2] = {1.5F, -2.0F};
  const std::string data(reinterpret_cast<const char*>(values), sizeof(values));
  const std::string path =
      write_all(folder.file("good.safetensors"), file_with(kGood, data + "bfbfbf" + std::string(12, 'x')));
  const TensorBuffer a = read_safetensors(path, "a");
  EXPECT_EQ(a.dtype(), DType::f32);
  EXPECT_EQ(static_cast<const float*>(a.data())[1], -2.0F);
  const TensorBuffer b = read_safetensors(path, "b");
  EXPECT_EQ(b.dtype(), DType::bf16);
  EXPECT_EQ(b.shape(), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(std::string(static_cast<const char*>(b.data()), 6), "bfbfbf");
  EXPECT_EQ(read_safetensors_header(path).metadata.at("made"), "by hand");

  EXPECT_THAT(error_of([&] { read_safetensors(path, "q"); }),
              HasSubstr("has no tensor 'q'; it holds 'a', 'b', 'c', 'scalar'"));
  EXPECT_THAT(error_of([&] { read_safetensors(path, "c"); }),
              HasSubstr("type 'I64'; expected F32, F16, BF16 or I32"));
  EXPECT_THAT(error_of([&] { read_safetensors(path, "scalar"); }), HasSubstr("rank 0"));
}

TEST(Safetensors, RefusesHeadersThatLie) {
  const auto one = [](const std::string& entry) { return R"({"a":)" + entry + "}"; };
  const std::vector<std::pair<std::string, const char*>> table = {
      {"[1]", "no JSON object"},
      {"{", "no JSON object"},
      {"", "no JSON object"},
      {"\xff\xfe", "no JSON object"},
      {one("3"), "lacks one of"},
      {one(R"({"dtype":"F32","shape":[2]})"), "lacks one of"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), "lacks one of"},
      {one(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})"), "lacks one of"},
      {one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "something other than lengths"},
      {one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "something other than lengths"},
      {one(R"({"dtype":"F32","shape":[[2]],"data_offsets":[0,8]})"), "something other than lengths"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]})"),
       "something other than lengths"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "claims the bytes 8 to 0"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})"),
       "claims the bytes 0 to 16; the file has 8"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "12 bytes, but claims 8"},
      {one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]})"),
       "more bytes than can be counted"},
      {one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), "leave a hole at byte"},
      {one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), "is longer than its tensors"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "overlap at byte"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "names the tensor 'a' twice"},
      {R"({"__metadata__":{"n":1},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "other than strings"},
      {R"({"__metadata__":[],"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "'__metadata__' is no JSON"},
  };
  TempFolder folder;
  for (const auto& [json, expected] : table) {
    const std::string path = write_all(folder.file("lie.safetensors"), file_with(json, "12345678"));
    EXPECT_THAT(error_of([&] { read_safetensors(path, "a"); }), HasSubstr(expected)) << json;
  }
}

TEST(Safetensors, RefusesEveryTruncation) {
  TempFolder folder;
  const std::string whole = file_with(kGood, std::string(26, 'x'));
  ASSERT_NO_THROW(read_safetensors_header(write_all(folder.file("whole.safetensors"), whole)));
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::string path = write_all(folder.file("cut.safetensors"), whole.substr(0, length));
    error_of([&] { read_safetensors_header(path); });
  }
}

TEST(Safetensors, RefusesHeaderLengthsThatLie) {
  TempFolder folder;
  for (const char last : {'\x7f', '\xff', '\x01'}) {
    std::string bytes = file_with(kGood, std::string(26, 'x'));
    bytes[7] = last;
    EXPECT_THAT(error_of([&] { read_safetensors_header(write_all(folder.file("long.safetensors"), bytes)); }),
                HasSubstr("its header claims"));
  }
}

TEST(Safetensors, DeepNestingIsNoProblem) {
  TempFolder folder;
  const std::string deep = R"({"a":)" + std::string(100000, '[') + std::string(100000, ']') + "}";
  const std::string path = write_all(folder.file("deep.safetensors"), file_with(deep));
  EXPECT_THAT(error_of([&] { read_safetensors_header(path); }), HasSubstr("lacks one of"));
}

TEST(Safetensors, ControlCharactersInNamesStayOnOneLine) {
  TempFolder folder;
  const std::string json = R"({"a\nb":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})";
  error_of(
      [&] { read_safetensors_header(write_all(folder.file("name.safetensors"), file_with(json, "1234"))); });
}

}  // namespace
}  // namespace attnspan::io
