#include "calls.hpp"

#include "attnspan/error.hpp"

namespace attnspan::python {

MaybeTensor::MaybeTensor(nb::handle object, const char* name, Access access, void* stream) {
  if (!object.is_none()) argument_.emplace(object.ptr(), name, access, stream);
}

Output::Output(nb::handle given, const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype,
               const char* name, void* stream) {
  object_ = given.is_none() ? nb::steal(new_tensor(like, shape, dtype, name)) : nb::borrow(given);
  argument_.emplace(object_.ptr(), name, Access::write, stream);
}

void refuse_autograd(Autograd autograd, const TensorArgument& tensor, const char* name) {
  if (autograd == Autograd::ignore || PyObject_CheckBuffer(tensor.object())) return;
  PyObject* requires_grad = PyObject_GetAttrString(tensor.object(), "requires_grad");
  const bool refused = requires_grad == Py_True;
  Py_XDECREF(requires_grad);
  PyErr_Clear();
  if (refused) {
    throw Error(ErrorCode::invalid_argument, name,
                "found a tensor that requires a gradient, expected a detached one: the functions of "
                "attnspan.torch have gradients");
  }
}

void* stream_address(nb::handle stream) {
  if (stream.is_none()) return nullptr;
  PyObject* address = PyLong_Check(stream.ptr()) ? nb::handle(stream).inc_ref().ptr() : nullptr;
  for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {
    if (address == nullptr) address = PyObject_GetAttrString(stream.ptr(), attribute);
    PyErr_Clear();
  }
  void* result = address != nullptr && PyLong_Check(address) ? PyLong_AsVoidPtr(address) : nullptr;
  const bool bad = address == nullptr || !PyLong_Check(address) || PyErr_Occurred() != nullptr;
  Py_XDECREF(address);
  PyErr_Clear();
  if (bad) {
    throw Error(ErrorCode::invalid_argument, "stream",
                std::string("found a value of type ") + Py_TYPE(stream.ptr())->tp_name +
                    ", expected the address of a cudaStream_t, or a stream of PyTorch, CuPy or numba");
  }
  return result;
}

Execution make_execution(const std::string& backend, int threads, void* stream, const TensorArgument& query) {
  Execution execution;
  execution.backend = backend;
  execution.threads = threads;
  execution.stream = stream != nullptr ? stream : current_stream(query);
  return execution;
}

Result& last_result() {
  thread_local Result result;
  return result;
}

std::vector<int64_t> out_shape(const Tensor& query, int64_t head_dim_v) {
  std::vector<int64_t> shape = shape_of(query);
  shape.back() = head_dim_v;
  return shape;
}

std::vector<int64_t> lse_shape(const Tensor& query) {
  if (query.rank == 3) return {query.shape[1], query.shape[0]};
  if (query.rank == 4) return {query.shape[0], query.shape[2], query.shape[1]};
  throw Error(
      ErrorCode::invalid_argument, "query",
      "found rank " + std::to_string(query.rank) + " " + query.shape_text() +
          ", expected [batch, seqlen_q, heads, head_dim], or [total_q, heads, head_dim] with cu_seqlens");
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

}  // namespace attnspan::python
