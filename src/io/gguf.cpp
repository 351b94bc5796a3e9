#include "io/gguf.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "attnspan/error.hpp"
#include "io/mapped_file.hpp"

namespace attnspan::io {
namespace {

// Types of metadata values, by number in the file.
enum Type : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

constexpr int64_t kMaxKeptArray = 4096;  // longer arrays are vocabularies, not layers
constexpr int64_t kDefaultAlignment = 32;

int64_t size_of_type(uint32_t type) {
  switch (type) {
    case u8:
    case i8:
    case boolean:
      return 1;
    case u16:
    case i16:
      return 2;
    case u32:
    case i32:
    case f32:
      return 4;
    case u64:
    case i64:
    case f64:
      return 8;
    default:
      return 0;
  }
}

bool is_integer(uint32_t type) { return type <= i32 || type == boolean || type == u64 || type == i64; }

class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  // What a stranger's file calls its keys may hold anything; the message stays one line of plain text.
  [[noreturn]] void refuse(std::string what) const {
    std::replace_if(
        what.begin(), what.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, '?');
    throw Error(ErrorCode::io, name_, what);
  }
  int64_t offset() const { return offset_; }

  std::span<const std::byte> take(uint64_t count) {
    if (count > bytes_.size() - static_cast<size_t>(offset_)) {
      refuse("is torn: its header goes on behind its " + std::to_string(bytes_.size()) + " bytes");
    }
    const auto taken = bytes_.subspan(static_cast<size_t>(offset_), count);
    offset_ += static_cast<int64_t>(count);
    return taken;
  }

  template <typename T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string text() {
    const auto characters = take(number<uint64_t>());
    return {reinterpret_cast<const char*>(characters.data()), characters.size()};
  }

  int64_t integer(uint32_t type) {
    switch (type) {
      case u8:
      case boolean:
        return number<uint8_t>();
      case i8:
        return number<int8_t>();
      case u16:
        return number<uint16_t>();
      case i16:
        return number<int16_t>();
      case u32:
        return number<uint32_t>();
      case i32:
        return number<int32_t>();
      default:  // u64 beyond int64 becomes negative, which no shape accepts
        return number<int64_t>();
    }
  }

 private:
  std::span<const std::byte> bytes_;
  int64_t offset_ = 0;
  const std::string& name_;
};

void read_array(Reader& reader, const std::string& key, GgufHeader& header) {
  const auto type = reader.number<uint32_t>();
  const auto count = reader.number<uint64_t>();
  if (type == string) {
    for (uint64_t i = 0; i < count; ++i) reader.take(reader.number<uint64_t>());
    return;
  }
  const int64_t size = size_of_type(type);
  if (size == 0) reader.refuse("found an array of type " + std::to_string(type) + " under '" + key + "'");
  if (!is_integer(type) || count > kMaxKeptArray) {
    // In two steps: the product of a hostile count could wrap.
    for (int64_t i = 0; i < size; ++i) reader.take(count);
    return;
  }
  std::vector<int64_t>& values = header.integers[key];
  values.clear();
  for (uint64_t i = 0; i < count; ++i) values.push_back(reader.integer(type));
}

void read_value(Reader& reader, const std::string& key, GgufHeader& header) {
  const auto type = reader.number<uint32_t>();
  if (type == array) return read_array(reader, key, header);
  if (type == string) {
    header.strings[key] = reader.text();
  } else if (is_integer(type)) {
    header.integers[key] = {reader.integer(type)};
  } else if (size_of_type(type) > 0) {
    reader.take(static_cast<uint64_t>(size_of_type(type)));
  } else {
    reader.refuse("found a value of type " + std::to_string(type) + " under '" + key + "', expected 0 to 12");
  }
}

void skip_tensor_info(Reader& reader) {
  reader.text();
  const auto dimensions = reader.number<uint32_t>();
  if (dimensions > 8) reader.refuse("found a tensor of " + std::to_string(dimensions) + " dimensions");
  reader.take(dimensions * sizeof(uint64_t));
  reader.take(sizeof(uint32_t) + sizeof(uint64_t));  // type, offset
}

}  // namespace

GgufHeader parse_gguf(std::span<const std::byte> bytes, const std::string& name) {
  Reader reader(bytes, name);
  if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0) {
    reader.refuse("is no GGUF file: it does not start with 'GGUF'");
  }
  reader.take(4);
  GgufHeader header;
  header.version = reader.number<uint32_t>();
  if (header.version != 2 && header.version != 3) {
    reader.refuse("found version " + std::to_string(header.version) + " of GGUF, expected 2 or 3");
  }
  const auto tensors = reader.number<uint64_t>();
  const auto values = reader.number<uint64_t>();
  for (uint64_t i = 0; i < values; ++i) {
    const std::string key = reader.text();
    read_value(reader, key, header);
  }
  for (uint64_t i = 0; i < tensors; ++i) skip_tensor_info(reader);
  header.tensor_count = static_cast<int64_t>(tensors);

  int64_t alignment = kDefaultAlignment;
  if (const auto found = header.integers.find("general.alignment"); found != header.integers.end()) {
    if (found->second.size() == 1 && found->second[0] > 0 && found->second[0] <= (1 << 20)) {
      alignment = found->second[0];
    }
  }
  const int64_t data = (reader.offset() + alignment - 1) / alignment * alignment;
  header.tensor_bytes = std::max<int64_t>(0, static_cast<int64_t>(bytes.size()) - data);
  return header;
}

GgufHeader read_gguf(const std::string& path) {
  const MappedFile file(path);
  return parse_gguf(file.bytes(), path);
}

}  // namespace attnspan::io
