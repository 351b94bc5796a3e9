#pragma once
// Runs the command as a user's shell would, and makes the files that it is given.

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../io/temp_folder.hpp"
#include "core/dtype.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "io/tensor_file.hpp"

namespace attnspan::cli_test {

using io::read_all;
using io::TempFolder;
using io::TensorBuffer;
using io::write_all;

struct Outcome {
  int status = -1;
  std::string out, err;
};

// `arguments` as in a shell; %s stands for the folder.
inline Outcome run_command(const TempFolder& folder, std::string arguments) {
  for (size_t at = arguments.find('%'); at != std::string::npos; at = arguments.find('%')) {
    arguments.replace(at, 1, folder.file(""));
  }
  const TempFolder pipes;
  const std::string line = std::string("'") + ATTNSPAN_COMMAND + "' " + arguments + " > " +
                           pipes.file("out") + " 2> " + pipes.file("err") + " < /dev/null";
  const int status = std::system(line.c_str());
  Outcome outcome{-1, read_all(pipes.file("out")), read_all(pipes.file("err"))};
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  return outcome;
}

inline TensorBuffer random_tensor(DType dtype, std::vector<int64_t> shape, uint64_t seed) {
  TensorBuffer buffer(dtype, std::move(shape));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < buffer.bytes() / size_of(dtype); ++i)
    store_f32(buffer.data(), i, dtype, normal(random));
  return buffer;
}

inline TensorBuffer int_tensor(const std::vector<int32_t>& values) {
  TensorBuffer buffer(DType::i32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(buffer.data()));
  return buffer;
}

// Not through OutputSet, which waits for the disk.
inline void save(const std::string& text, const TensorBuffer& buffer) {
  const io::TensorAddress address = io::parse_address(text);
  const io::NamedTensor named{address.tensor, &buffer};
  const std::string header = address.tensor.empty() ? io::npy_header(buffer.dtype(), buffer.shape())
                                                    : io::safetensors_header({&named, 1});
  write_all(address.path, header + std::string(static_cast<const char*>(buffer.data()), buffer.bytes()));
}

inline std::vector<float> load(const std::string& address) {
  const TensorBuffer buffer = io::read_tensor(io::parse_address(address));
  std::vector<float> values;
  for (int64_t i = 0; i < buffer.bytes() / size_of(buffer.dtype()); ++i) {
    values.push_back(load_f32(buffer.data(), i, buffer.dtype()));
  }
  return values;
}

}  // namespace attnspan::cli_test
