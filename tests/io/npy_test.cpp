// .npy files that NumPy wrote (tests/io/data, made by tools/make_npy_fixtures.py), and files that lie.

#include "io/npy.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "core/dtype.hpp"
#include "io/temp_folder.hpp"
#include "io/tensor_file.hpp"

namespace attnspan::io {
namespace {

using testing::HasSubstr;

std::string fixture(const std::string& name) { return std::string(ATTNSPAN_TEST_DATA) + "/" + name + ".npy"; }

TEST(Npy, ReadsWhatNumpyWrites) {
  for (const char* name : {"f4", "f2", "version2_f4", "version3_f4"}) {
    const TensorBuffer buffer = read_npy(fixture(name));
    EXPECT_EQ(buffer.shape(), (std::vector<int64_t>{2, 3})) << name;
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(load_f32(buffer.data(), i, buffer.dtype()), static_cast<float>(i) / 2) << name;
    }
  }
  const TensorBuffer integers = read_npy(fixture("i4"));
  ASSERT_EQ(integers.dtype(), DType::i32);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(static_cast<const int32_t*>(integers.data())[i], i);
}

TEST(Npy, ReadsEveryRankAndEmptyTensors) {
  EXPECT_EQ(read_npy(fixture("rank1_i4")).shape(), (std::vector<int64_t>{3}));
  EXPECT_EQ(read_npy(fixture("rank4_f4")).shape(), (std::vector<int64_t>{1, 2, 3, 4}));
  const TensorBuffer empty = read_npy(fixture("empty_f4"));
  EXPECT_EQ(empty.shape(), (std::vector<int64_t>{2, 0, 3}));
  EXPECT_EQ(empty.bytes(), 0);
  EXPECT_NE(empty.data(), nullptr);
}

TEST(Npy, WritesByteForByteWhatNumpyWrites) {
  TempFolder folder;
  for (const char* name : {"f4", "f2", "i4", "rank1_i4", "rank4_f4", "empty_f4"}) {
    const TensorBuffer buffer = read_npy(fixture(name));
    const TensorAddress address = parse_address(folder.file("out.npy"));
    OutputSet outputs;
    outputs.add(address, buffer.dtype());
    outputs.set(address, buffer);
    outputs.write();
    EXPECT_EQ(read_all(address.path), read_all(fixture(name))) << name;
  }
}

TEST(Npy, RefusesByName) {
  const std::vector<std::pair<const char*, const char*>> table = {
      {"bad_f8", "has elements of type '<f8'; expected f32 ('<f4'), f16 ('<f2') or int32 ('<i4')"},
      {"bad_i8", "'<i8'"},
      {"bad_bool", "'|b1'"},
      {"bad_text", "'<U5'"},
      {"bad_big_endian", "is big-endian ('>f4')"},
      {"bad_fortran", "Fortran order"},
      {"bad_objects", "holds Python objects ('|O')"},
      {"bad_records", "holds records"},
      {"bad_rank0", "rank 0"},
      {"bad_rank5", "rank 5, shape [1, 1, 1, 1, 1]; expected rank 1 to 4"},
  };
  for (const auto& [name, expected] : table) {
    const std::string message = error_of([&, name = name] { read_npy(fixture(name)); });
    EXPECT_THAT(message, HasSubstr(expected)) << name;
    EXPECT_THAT(message, HasSubstr(fixture(name)));
  }
}

TEST(Npy, RefusesEveryTruncation) {
  TempFolder folder;
  for (const char* name : {"f4", "version2_f4"}) {
    const std::string whole = read_all(fixture(name));
    for (size_t length = 0; length < whole.size(); ++length) {
      const std::string path = write_all(folder.file("cut.npy"), whole.substr(0, length));
      error_of([&] { read_npy(path); });
    }
    EXPECT_THAT(error_of([&] { read_npy(write_all(folder.file("long.npy"), whole + "x")); }),
                HasSubstr("is too long: its shape [2, 3] needs 24 bytes of f32, the file has 25"));
  }
}

std::string npy_with(const std::string& dictionary, const std::string& data = "") {
  std::string bytes = "\x93NUMPY";
  bytes += {'\x01', '\x00', static_cast<char>(dictionary.size() & 0xff),
            static_cast<char>(dictionary.size() >> 8)};
  return bytes + dictionary + data;
}

TEST(Npy, RefusesHeadersThatLie) {
  const std::string head = "{'descr': '<f4', 'fortran_order': False, 'shape': ";
  const std::vector<std::pair<std::string, const char*>> table = {
      {head + "(9223372036854775807, 2), }", "more bytes than can be counted"},
      {head + "(3037000500, 3037000500, 4), }", "more bytes than can be counted"},
      {head + "(1000000000, 1000), }", "is truncated"},
      {head + "(-1, 3), }", "something other than lengths"},
      {head + "(99999999999999999999,), }", "something other than lengths"},
      {head + "(2.0,), }", "is no NumPy header"},
      {head + "(1,), 'shape': (1,), }", "repeated key 'shape'"},
      {head + "(1,), 'extra': 1}", "unexpected or repeated key 'extra'"},
      {head + "(1,), } trailing", "text after the dictionary"},
      {"{'descr': '<f4', 'shape': (1,), }", "lacks one of"},
      {"{'descr': '<f4', 'fortran_order': Maybe, 'shape': (1,)}", "neither True nor False"},
      {"{'descr': '<f4", "string without an end"},
      {"{'descr': '<f4\n', 'fortran_order': False, 'shape': (1,)}", "no plain text"},
      {"", "is no NumPy header"},
      {"[1, 2]", "is no NumPy header"},
  };
  TempFolder folder;
  for (const auto& [dictionary, expected] : table) {
    const std::string path = write_all(folder.file("lie.npy"), npy_with(dictionary, "1234"));
    EXPECT_THAT(error_of([&] { read_npy(path); }), HasSubstr(expected)) << dictionary;
  }
  EXPECT_THAT(error_of([&] { read_npy(write_all(folder.file("zip.npy"), "PK\x03\x04 something else")); }),
              HasSubstr("is no .npy file"));
  std::string version9 = read_all(fixture("f4"));
  version9[6] = 9;
  EXPECT_THAT(error_of([&] { read_npy(write_all(folder.file("v9.npy"), version9)); }),
              HasSubstr("version 9"));
}

TEST(Npy, NamesMissingFilesAndFolders) {
  TempFolder folder;
  EXPECT_THAT(error_of([&] { read_npy(folder.file("none.npy")); }),
              HasSubstr("cannot be read: No such file"));
  std::filesystem::create_directory(folder.file("folder.npy"));
  EXPECT_THAT(error_of([&] { read_npy(folder.file("folder.npy")); }), HasSubstr("is no regular file"));
}

}  // namespace
}  // namespace attnspan::io
