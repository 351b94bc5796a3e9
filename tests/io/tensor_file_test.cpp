// Addresses, and the promise that outputs appear whole and together or not at all.

#include "io/tensor_file.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "io/safetensors.hpp"
#include "io/temp_folder.hpp"

namespace attnspan::io {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Address, NpyAndSafetensors) {
  EXPECT_EQ(parse_address("a/b.npy").path, "a/b.npy");
  const TensorAddress address = parse_address("x.safetensors:model.layers.0:k");
  EXPECT_EQ(address.format, TensorAddress::Format::safetensors);
  EXPECT_EQ(address.path, "x.safetensors");
  EXPECT_EQ(address.tensor, "model.layers.0:k");
}

TEST(Address, RefusesTheRest) {
  for (const char* text :
       {"", "q", ".npy", "q.npz", "q.npy:a", "q.safetensors", "q.safetensors:", ".safetensors:a"}) {
    EXPECT_THAT(error_of([&] { parse_address(text); }), HasSubstr(text)) << text;
  }
}

TensorBuffer numbers(DType dtype, std::vector<int64_t> shape) {
  TensorBuffer buffer(dtype, std::move(shape));
  for (int64_t i = 0; i < buffer.bytes(); ++i)
    static_cast<char*>(buffer.data())[i] = static_cast<char>(7 * i + 1);
  return buffer;
}

TEST(OutputSet, SeveralTensorsShareOneSafetensorsFile) {
  TempFolder folder;
  const TensorBuffer out = numbers(DType::bf16, {1, 2, 3}), lse = numbers(DType::f32, {5}),
                     none = numbers(DType::i32, {0, 4});
  const std::string path = folder.file("o.safetensors");
  const std::vector<std::pair<std::string, const TensorBuffer*>> all = {
      {"out", &out}, {"lse", &lse}, {"none", &none}};
  OutputSet outputs;
  for (const auto& [name, buffer] : all) outputs.add(parse_address(path + ":" + name), buffer->dtype());
  for (const auto& [name, buffer] : all) outputs.set(parse_address(path + ":" + name), *buffer);
  outputs.write();
  EXPECT_THAT(folder.names(), ElementsAre("o.safetensors"));
  for (const auto& [name, buffer] : all) {
    const TensorBuffer back = read_safetensors(path, name);
    EXPECT_EQ(back.dtype(), buffer->dtype());
    EXPECT_EQ(back.shape(), buffer->shape());
    EXPECT_EQ(std::memcmp(back.data(), buffer->data(), static_cast<size_t>(back.bytes())), 0);
  }
}

TEST(OutputSet, ReplacesAnExistingFileOnlyOnWrite) {
  TempFolder folder;
  const std::string path = write_all(folder.file("o.npy"), "old");
  const TensorBuffer out = numbers(DType::f32, {2});
  OutputSet outputs;
  outputs.add(parse_address(path), DType::f32);
  EXPECT_EQ(read_all(path), "old");
  EXPECT_THAT(folder.names(), ElementsAre("o.npy"));
  outputs.set(parse_address(path), out);
  outputs.write();
  EXPECT_EQ(read_all(path).substr(1, 5), "NUMPY");
  EXPECT_THAT(folder.names(), ElementsAre("o.npy"));
}

TEST(OutputSet, RefusesBeforeAnyWork) {
  TempFolder folder;
  OutputSet outputs;
  const auto add = [&](const std::string& name, DType dtype) {
    return error_of([&] { outputs.add(parse_address(folder.file(name)), dtype); });
  };
  EXPECT_THAT(add("missing/o.npy", DType::f32), HasSubstr("cannot be written: No such file"));
  EXPECT_THAT(add("o.npy", DType::bf16), HasSubstr("bf16"));
  std::filesystem::create_directory(folder.file("folder.npy"));
  EXPECT_THAT(add("folder.npy", DType::f32), HasSubstr("is no regular file"));
  outputs.add(parse_address(folder.file("o.npy")), DType::f32);
  EXPECT_THAT(add("o.npy", DType::f32), HasSubstr("is named for two outputs"));
  outputs.add(parse_address(folder.file("o.safetensors:a")), DType::f32);
  outputs.add(parse_address(folder.file("o.safetensors:b")), DType::f32);
  EXPECT_THAT(add("o.safetensors:a", DType::f32), HasSubstr("tensor 'a' is named for two outputs"));
  EXPECT_THAT(add("./o.safetensors:c", DType::f32), HasSubstr("o.safetensors; spell both alike"));
  EXPECT_THAT(folder.names(), ElementsAre("folder.npy"));
}

TEST(TensorBuffer, RefusesWhatCannotBeAllocated) {
  EXPECT_THAT(error_of([] {
                TensorBuffer(DType::f32, {int64_t{1} << 40, int64_t{1} << 40});
              }),
              HasSubstr("too large"));
  EXPECT_THAT(error_of([] { TensorBuffer(DType::f32, {1, 1, 1, 1, 1}); }), HasSubstr("rank 5"));
}

}  // namespace
}  // namespace attnspan::io
