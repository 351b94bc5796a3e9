#include "io/safetensors.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "attnspan/error.hpp"
#include "io/file.hpp"

namespace attnspan::io {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeader = 100'000'000;  // the limit of the format

struct TypeName {
  const char* name;
  DType dtype;
};
constexpr TypeName kReadable[] = {
    {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}, {"I32", DType::i32}};

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::io, name, what);
}

// Names and types come from the file and go into one-line messages.
std::string in_quotes(const std::string& text) {
  std::string printable = "'";
  for (const char c : text.substr(0, 80)) printable += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return printable + (text.size() > 80 ? "...'" : "'");
}

std::optional<DType> dtype_of(const std::string& type) {
  for (const TypeName& known : kReadable) {
    if (type == known.name) return known.dtype;
  }
  return std::nullopt;
}

json parse_json(std::span<const char> header, const std::string& name) {
  // The parser keeps the last of two equal keys; two tensors of one name are an error instead.
  std::set<std::string> top_level;
  std::string repeated;
  const auto note_key = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth == 1 && event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!top_level.insert(key).second && repeated.empty()) repeated = key;
    }
    return depth <= 3;  // {name: {"shape": [...]}}: anything deeper is dropped and missed below
  };
  json parsed = json::parse(header.begin(), header.end(), note_key, /*allow_exceptions=*/false);
  if (parsed.is_discarded() || !parsed.is_object()) refuse(name, "its header is no JSON object");
  if (!repeated.empty()) refuse(name, "its header names the tensor " + in_quotes(repeated) + " twice");
  return parsed;
}

int64_t length(const json& value, const std::string& name, const std::string& where) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
    refuse(name, where + " has something other than lengths");
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

SafetensorsEntry parse_entry(const std::string& tensor, const json& value, int64_t data_begin,
                             int64_t data_bytes, const std::string& name) {
  const std::string where = "tensor " + in_quotes(tensor);
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() ||
      !value.contains("shape") || !value["shape"].is_array() || !value.contains("data_offsets") ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2) {
    refuse(name, where + " lacks one of 'dtype', 'shape', 'data_offsets'");
  }
  SafetensorsEntry entry;
  entry.type = value["dtype"].get<std::string>();
  for (const json& extent : value["shape"]) entry.shape.push_back(length(extent, name, where + ": 'shape'"));
  const int64_t begin = length(value["data_offsets"][0], name, where + ": 'data_offsets'");
  const int64_t end = length(value["data_offsets"][1], name, where + ": 'data_offsets'");
  if (begin > end || end > data_bytes) {
    refuse(name, where + " claims the bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                     "; the file has " + std::to_string(data_bytes) + " bytes of data");
  }
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  if (const std::optional<DType> dtype = dtype_of(entry.type)) {
    const std::optional<int64_t> expected = checked_bytes(entry.shape, size_of(*dtype));
    if (!expected) {
      refuse(name,
             where + " claims the shape " + shape_text(entry.shape) + ", more bytes than can be counted");
    }
    if (*expected != end - begin) {
      refuse(name, where + " has the shape " + shape_text(entry.shape) + " of " + entry.type + ", " +
                       std::to_string(*expected) + " bytes, but claims " + std::to_string(end - begin));
    }
  }
  return entry;
}

// Sorted by offset, the tensors must cover the data without holes or overlaps.
void check_coverage(const SafetensorsHeader& header, int64_t data_begin, int64_t file_size,
                    const std::string& name) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [tensor, entry] : header.tensors) ranges.emplace_back(entry.begin, entry.end);
  std::sort(ranges.begin(), ranges.end());
  int64_t covered = data_begin;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered) {
      refuse(name, "its tensors " + std::string(begin < covered ? "overlap" : "leave a hole") + " at byte " +
                       std::to_string(std::min(begin, covered)));
    }
    covered = end;
  }
  if (covered != file_size) {
    refuse(name, "is longer than its tensors: they end at byte " + std::to_string(covered) +
                     ", the file has " + std::to_string(file_size));
  }
}

}  // namespace

std::string SafetensorsHeader::names() const {
  if (tensors.empty()) return "no tensors";
  constexpr int kShown = 12;  // a model's file has hundreds
  std::string text;
  int shown = 0;
  for (const auto& [tensor, entry] : tensors) {
    if (shown++ == kShown) return text + ", and " + std::to_string(tensors.size() - kShown) + " more";
    text += (text.empty() ? "" : ", ") + in_quotes(tensor);
  }
  return text;
}

int64_t safetensors_header_bytes(std::span<const std::byte, 8> prefix, int64_t file_size,
                                 const std::string& name) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < prefix.size(); ++i) bytes |= std::to_integer<uint64_t>(prefix[i]) << (8 * i);
  if (bytes > static_cast<uint64_t>(file_size) - 8) {
    refuse(name, "is truncated or no safetensors file: its header claims " + std::to_string(bytes) +
                     " bytes, the file has " + std::to_string(file_size));
  }
  if (bytes > kMaxHeader) {
    refuse(name, "has a header of " + std::to_string(bytes) + " bytes; the format allows 100000000");
  }
  return static_cast<int64_t>(bytes);
}

SafetensorsHeader parse_safetensors_header(std::span<const char> header, int64_t file_size,
                                           const std::string& name) {
  const int64_t data_begin = 8 + static_cast<int64_t>(header.size());
  const json parsed = parse_json(header, name);
  SafetensorsHeader result;
  for (const auto& [tensor, value] : parsed.items()) {
    if (tensor == "__metadata__") {
      if (!value.is_object()) refuse(name, "'__metadata__' is no JSON object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) refuse(name, "'__metadata__' has something other than strings");
        result.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    result.tensors[tensor] = parse_entry(tensor, value, data_begin, file_size - data_begin, name);
  }
  check_coverage(result, data_begin, file_size, name);
  return result;
}

SafetensorsHeader read_safetensors_header(const std::string& path) {
  InputFile file(path);
  if (file.size() < 8) refuse(path, "is truncated: a safetensors file has at least 8 bytes");
  std::array<std::byte, 8> prefix{};
  file.read_at(0, prefix.data(), prefix.size());
  std::string header(static_cast<size_t>(safetensors_header_bytes(prefix, file.size(), path)), '\0');
  file.read_at(8, header.data(), static_cast<int64_t>(header.size()));
  return parse_safetensors_header(header, file.size(), path);
}

TensorBuffer read_safetensors(const std::string& path, const std::string& tensor) {
  const SafetensorsHeader header = read_safetensors_header(path);
  const auto found = header.tensors.find(tensor);
  if (found == header.tensors.end()) {
    refuse(path, "has no tensor " + in_quotes(tensor) + "; it holds " + header.names());
  }
  const SafetensorsEntry& entry = found->second;
  const std::optional<DType> dtype = dtype_of(entry.type);
  if (!dtype) {
    refuse(path, "tensor " + in_quotes(tensor) + " has elements of type " + in_quotes(entry.type) +
                     "; expected F32, F16, BF16 or I32");
  }
  if (entry.shape.empty() || entry.shape.size() > kMaxRank) {
    refuse(path, "tensor " + in_quotes(tensor) + " has rank " + std::to_string(entry.shape.size()) +
                     ", shape " + shape_text(entry.shape) + "; expected rank 1 to 4");
  }
  TensorBuffer buffer(*dtype, entry.shape);
  InputFile(path).read_at(entry.begin, buffer.data(), buffer.bytes());
  return buffer;
}

std::string safetensors_header(std::span<const NamedTensor> tensors) {
  json header = json::object();
  int64_t offset = 0;
  for (const auto& [name, buffer] : tensors) {
    std::string type;
    for (const TypeName& known : kReadable) {
      if (buffer->dtype() == known.dtype) type = known.name;
    }
    header[name] = {
        {"dtype", type}, {"shape", buffer->shape()}, {"data_offsets", {offset, offset + buffer->bytes()}}};
    offset += buffer->bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8, ' ');  // the format allows trailing spaces
  std::string prefix(8, '\0');
  for (size_t i = 0; i < prefix.size(); ++i) prefix[i] = static_cast<char>((text.size() >> (8 * i)) & 0xff);
  return prefix + text;
}

}  // namespace attnspan::io
