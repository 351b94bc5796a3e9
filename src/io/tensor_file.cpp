#include "io/tensor_file.hpp"

#include <filesystem>

#include "attnspan/error.hpp"
#include "io/file.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace attnspan::io {

TensorAddress parse_address(const std::string& text) {
  constexpr std::string_view kNpy = ".npy", kSafetensors = ".safetensors";
  const auto ends_with = [&](std::string_view suffix) {
    return text.size() > suffix.size() && text.ends_with(suffix);
  };
  const size_t colon = text.find(std::string(kSafetensors) + ":");
  if (colon != std::string::npos && colon > 0) {
    const size_t path_end = colon + kSafetensors.size();
    if (path_end + 1 == text.size()) throw Error(ErrorCode::io, text, "names no tensor after the colon");
    return {TensorAddress::Format::safetensors, text.substr(0, path_end), text.substr(path_end + 1)};
  }
  if (ends_with(kNpy)) return {TensorAddress::Format::npy, text, ""};
  if (ends_with(kSafetensors)) {
    throw Error(ErrorCode::io, text, "names a file of several tensors; expected FILE.safetensors:TENSOR");
  }
  throw Error(ErrorCode::io, text, "is neither FILE.npy nor FILE.safetensors:TENSOR");
}

TensorBuffer read_tensor(const TensorAddress& address) {
  return address.format == TensorAddress::Format::npy ? read_npy(address.path)
                                                      : read_safetensors(address.path, address.tensor);
}

void OutputSet::add(const TensorAddress& address, DType dtype) {
  if (address.format == TensorAddress::Format::npy && dtype == DType::bf16) {
    throw Error(ErrorCode::io, address.path,
                "cannot hold bf16, which .npy has no name for; use FILE.safetensors:TENSOR");
  }
  std::vector<Item>& items = files_[address.path];
  for (const Item& item : items) {
    if (item.tensor == address.tensor) {
      throw Error(ErrorCode::io, address.path,
                  address.tensor.empty() ? "is named for two outputs"
                                         : "tensor '" + address.tensor + "' is named for two outputs");
    }
  }
  if (items.empty()) {
    refuse_second_spelling(address.path);
    OutputFile probe(address.path);  // leaves nothing behind
  }
  items.push_back({address.tensor, nullptr});
}

// "o.safetensors" and "./o.safetensors" would be written one over the other.
void OutputSet::refuse_second_spelling(const std::string& path) const {
  std::error_code error;
  const std::filesystem::path place = std::filesystem::weakly_canonical(path, error);
  for (const auto& [other, items] : files_) {
    if (other != path && !error && std::filesystem::weakly_canonical(other, error) == place) {
      throw Error(ErrorCode::io, path, "is the same file as " + other + "; spell both alike");
    }
  }
}

void OutputSet::set(const TensorAddress& address, const TensorBuffer& buffer) {
  for (Item& item : files_.at(address.path)) {
    if (item.tensor == address.tensor) item.buffer = &buffer;
  }
}

void OutputSet::write() {
  std::vector<OutputFile> written;
  for (const auto& [path, items] : files_) {
    OutputFile& file = written.emplace_back(path);
    std::vector<NamedTensor> tensors;
    for (const Item& item : items) tensors.push_back({item.tensor, item.buffer});
    const bool npy = path.ends_with(".npy");
    const std::string header = npy ? npy_header(tensors[0].buffer->dtype(), tensors[0].buffer->shape())
                                   : safetensors_header(tensors);
    file.write(header.data(), static_cast<int64_t>(header.size()));
    for (const NamedTensor& tensor : tensors) file.write(tensor.buffer->data(), tensor.buffer->bytes());
    file.flush();
  }
  for (OutputFile& file : written) file.commit();
}

}  // namespace attnspan::io
