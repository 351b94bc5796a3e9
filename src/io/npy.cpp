#include "io/npy.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "attnspan/error.hpp"
#include "io/file.hpp"

namespace attnspan::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr const char* kExpectedTypes = "expected f32 ('<f4'), f16 ('<f2') or int32 ('<i4')";

// The header is a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  NpyHeader parse() {
    NpyHeader header;
    bool seen_descr = false, seen_order = false, seen_shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && !seen_descr) {
        seen_descr = true;
        header.dtype = dtype();
      } else if (key == "fortran_order" && !seen_order) {
        seen_order = true;
        if (boolean()) refuse("is in Fortran order; expected C order (save numpy.ascontiguousarray(...))");
      } else if (key == "shape" && !seen_shape) {
        seen_shape = true;
        header.shape = shape();
      } else {
        refuse("its header has an unexpected or repeated key '" + key + "'");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    if (peek() != '\0') refuse("its header has text after the dictionary");
    if (!seen_descr || !seen_order || !seen_shape) {
      refuse("its header lacks one of 'descr', 'fortran_order', 'shape'");
    }
    return header;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { throw Error(ErrorCode::io, name_, what); }

  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) {
      refuse("its header is no NumPy header: expected '" + std::string(1, wanted) + "' at character " +
             std::to_string(at_));
    }
  }

  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') expect('\'');
    const size_t end = text_.find(quote, ++at_);
    if (end == std::string_view::npos) refuse("its header has a string without an end");
    std::string value(text_.substr(at_, end - at_));
    at_ = end + 1;
    // What is read is quoted in messages, which are one line of text.
    for (const char c : value) {
      if (static_cast<unsigned char>(c) < 0x20 || c == '\\')
        refuse("its header has a string that is no plain text");
    }
    return value;
  }

  DType dtype() {
    if (peek() == '[') refuse(std::string("holds records (a structured dtype); ") + kExpectedTypes);
    const std::string descr = string();
    if (descr == "<f4") return DType::f32;
    if (descr == "<f2") return DType::f16;
    if (descr == "<i4") return DType::i32;
    const std::string found = "has elements of type '" + descr + "'";
    if (descr.find('O') != std::string::npos)
      refuse("holds Python objects ('" + descr + "'); " + kExpectedTypes);
    if (!descr.empty() && descr[0] == '>') refuse("is big-endian ('" + descr + "'); " + kExpectedTypes);
    if (descr == "<V2" || descr == "|V2") {
      refuse(found + ", as bf16 would be, which .npy cannot name; use a .safetensors file");
    }
    refuse(found + "; " + kExpectedTypes);
  }

  bool boolean() {
    peek();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    refuse("its header's 'fortran_order' is neither True nor False");
  }

  std::vector<int64_t> shape() {
    std::vector<int64_t> extents;
    expect('(');
    while (!accept(')')) {
      peek();
      int64_t extent = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), extent);
      if (error != std::errc{} || extent < 0) refuse("its header's 'shape' has something other than lengths");
      at_ += static_cast<size_t>(end - begin);
      extents.push_back(extent);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return extents;
  }

  std::string_view text_;
  const std::string& name_;
  size_t at_ = 0;
};

}  // namespace

NpyHeader parse_npy_header(std::span<const std::byte> head, int64_t file_size, const std::string& name) {
  const auto refuse = [&](const std::string& what) { throw Error(ErrorCode::io, name, what); };
  const std::string_view bytes(reinterpret_cast<const char*>(head.data()), head.size());
  if (bytes.substr(0, kMagic.size()) != kMagic) refuse("is no .npy file: it does not start with \\x93NUMPY");
  if (bytes.size() < 10) refuse("is truncated within its first 10 bytes");
  const auto byte = [&](size_t i) { return static_cast<int64_t>(static_cast<unsigned char>(bytes[i])); };
  const int64_t version = byte(6);
  if (version < 1 || version > 3) {
    refuse("is a .npy file of version " + std::to_string(version) + "; expected 1, 2 or 3");
  }
  const int64_t text_offset = version == 1 ? 10 : 12;
  if (static_cast<int64_t>(bytes.size()) < text_offset) refuse("is truncated within its first 12 bytes");
  int64_t length = byte(8) | byte(9) << 8;
  if (version > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (text_offset + length > file_size) {
    refuse("is truncated: its header claims " + std::to_string(length) + " bytes, the file has " +
           std::to_string(file_size));
  }
  if (text_offset + length > static_cast<int64_t>(bytes.size())) {
    refuse("has a header of " + std::to_string(length) + " bytes; at most 65536 are read");
  }

  NpyHeader header = HeaderParser(bytes.substr(text_offset, length), name).parse();
  header.data_offset = text_offset + length;
  if (header.shape.empty() || header.shape.size() > kMaxRank) {
    refuse("has rank " + std::to_string(header.shape.size()) + ", shape " + shape_text(header.shape) +
           "; expected rank 1 to 4");
  }
  const std::optional<int64_t> expected = checked_bytes(header.shape, size_of(header.dtype));
  if (!expected) refuse("claims the shape " + shape_text(header.shape) + ", more bytes than can be counted");
  const int64_t found = file_size - header.data_offset;
  if (found != *expected) {
    refuse(std::string(found < *expected ? "is truncated: " : "is too long: ") + "its shape " +
           shape_text(header.shape) + " needs " + std::to_string(*expected) + " bytes of " +
           name_of(header.dtype) + ", the file has " + std::to_string(found));
  }
  return header;
}

TensorBuffer read_npy(const std::string& path) {
  InputFile file(path);
  std::vector<std::byte> head(static_cast<size_t>(std::min(file.size(), kMaxNpyHeader)));
  file.read_at(0, head.data(), static_cast<int64_t>(head.size()));
  const NpyHeader header = parse_npy_header(head, file.size(), path);
  TensorBuffer buffer(header.dtype, header.shape);
  file.read_at(header.data_offset, buffer.data(), buffer.bytes());
  return buffer;
}

std::string npy_header(DType dtype, const std::vector<int64_t>& shape) {
  std::string descr;
  switch (dtype) {
    case DType::f32:
      descr = "<f4";
      break;
    case DType::f16:
      descr = "<f2";
      break;
    case DType::i32:
      descr = "<i4";
      break;
    case DType::bf16:
      throw Error(ErrorCode::invalid_argument, "", ".npy has no bf16; use a .safetensors file");
  }
  std::string text = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (";
  for (const int64_t extent : shape) text += std::to_string(extent) + ", ";
  if (shape.size() > 1) text.resize(text.size() - 2);  // Python writes (2, 3), but (2,)
  if (shape.size() == 1) text.resize(text.size() - 1);
  text += "), }";
  constexpr size_t kPreamble = 10;
  const size_t padded = (kPreamble + text.size() + 1 + 63) / 64 * 64 - kPreamble;  // 1: the closing newline
  text.resize(padded - 1, ' ');
  text += '\n';
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(padded & 0xff), static_cast<char>(padded >> 8)};
  return header + text;
}

}  // namespace attnspan::io
