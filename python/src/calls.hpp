#pragma once
// What a call of Python needs besides its options: tensors that may be absent, outputs that may have to be
// made, where to run.

#include <nanobind/nanobind.h>
#include <optional>
#include <string>

#include "options.hpp"
#include "tensor_argument.hpp"

namespace attnspan::python {

// Whether tensors that autograd follows are taken. The public functions refuse them: they would return
// results without a gradient and say nothing. The PyTorch operators, which have one, do not.
enum class Autograd { refuse, ignore };

// An optional tensor argument.
class MaybeTensor {
 public:
  MaybeTensor(nb::handle object, const char* name, Access access, void* stream);
  explicit operator bool() const { return argument_.has_value(); }
  const Tensor& view() const { return argument_ ? argument_->view() : kNone; }
  const TensorArgument& argument() const { return *argument_; }

 private:
  static inline const Tensor kNone{};
  std::optional<TensorArgument> argument_;
};

// An output: the caller's tensor, or a new one like `like`.
class Output {
 public:
  Output(nb::handle given, const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype,
         const char* name, void* stream);
  const Tensor& view() const { return argument_->view(); }
  nb::object object() const { return object_; }

 private:
  nb::object object_;
  std::optional<TensorArgument> argument_;
};

void refuse_autograd(Autograd autograd, const TensorArgument& tensor, const char* name);

// None, an integer, or an object with `cuda_stream` (PyTorch), `ptr` (CuPy) or `handle` (numba).
void* stream_address(nb::handle stream);

Execution make_execution(const std::string& backend, int threads, void* stream, const TensorArgument& query);

// Releases the interpreter while `work` runs and keeps its result for last_result().
template <typename Work>
void run(Work&& work);

// The backend of this thread's last call, and what it replaced under nan_guard.
Result& last_result();

template <typename Work>
void run(Work&& work) {
  Result result;
  {
    nb::gil_scoped_release release;
    result = work();
  }
  last_result() = std::move(result);
}

// "[2, 128, 8]" and not the batch where cu_seqlens packs it away.
std::vector<int64_t> out_shape(const Tensor& query, int64_t head_dim_v);
std::vector<int64_t> lse_shape(const Tensor& query);
std::vector<int64_t> shape_of(const Tensor& tensor);

void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);

}  // namespace attnspan::python
