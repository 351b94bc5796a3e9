#pragma once
// Tensors by address: `q.npy`, or `model.safetensors:tensor`. What the command's flags take.

#include <map>
#include <string>
#include <vector>

#include "io/tensor_buffer.hpp"

namespace attnspan::io {

struct TensorAddress {
  enum class Format { npy, safetensors };
  Format format = Format::npy;
  std::string path;
  std::string tensor;  // safetensors only
};

// Throws Error(io, text, ...) for anything that is neither.
TensorAddress parse_address(const std::string& text);
TensorBuffer read_tensor(const TensorAddress& address);

// Results on their way to files. All are written or none: each file is written beside its destination, and
// only when all of them are on the disk they are renamed. Several results may share one safetensors file.
class OutputSet {
 public:
  // Checks that the file can be written, before any work is done for it. An existing file is replaced as a
  // whole. `dtype` is what will be written.
  void add(const TensorAddress& address, DType dtype);
  void set(const TensorAddress& address, const TensorBuffer& buffer);  // kept by reference until write()
  void write();

 private:
  struct Item {
    std::string tensor;
    const TensorBuffer* buffer = nullptr;
  };
  void refuse_second_spelling(const std::string& path) const;

  std::map<std::string, std::vector<Item>> files_;
};

}  // namespace attnspan::io
