#pragma once
// Tensors of Python as attnspan::Tensor, without copies: NumPy arrays (buffer protocol), tensors of libraries
// with DLPack's exchange API (PyTorch: no Python code runs), and anything else with __dlpack__.

#include <Python.h>

#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "dlpack_abi.hpp"

namespace attnspan::python {

enum class Access { read, write };

// An error with a Python exception behind it that is already set: the binding lets it through as it is.
struct PythonErrorSet {};

// One tensor argument, lent to us for the length of a call.
class TensorArgument {
 public:
  // `name` is the argument in error messages. `stream` is handed to __dlpack__ of device tensors.
  TensorArgument(PyObject* object, const char* name, Access access, void* stream = nullptr);
  ~TensorArgument();
  TensorArgument(const TensorArgument&) = delete;
  TensorArgument& operator=(const TensorArgument&) = delete;

  const Tensor& view() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  int device_id() const { return device_id_; }
  PyObject* object() const { return object_; }
  // Null unless the tensor's library has the exchange API.
  const dlpack::ExchangeApi* api() const { return api_; }

 private:
  void borrow_dlpack(const dlpack::DLTensor& tensor);
  void borrow_buffer();
  void import_capsule(void* stream, Access access);

  PyObject* object_;
  const char* name_;
  Tensor tensor_;
  int device_id_ = 0;
  const dlpack::ExchangeApi* api_ = nullptr;
  // What keeps the memory alive, at most one of them:
  Py_buffer buffer_{};
  dlpack::DLManagedTensor* managed_ = nullptr;
  dlpack::DLManagedTensorVersioned* managed_versioned_ = nullptr;
  bool bfloat16_as_uint16_ = false;  // ml_dtypes' bfloat16, which the buffer protocol cannot name
};

// A new uninitialised tensor of the library and on the device of `like`; a new reference.
PyObject* new_tensor(const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype,
                     const char* name);

// The stream on which the library of a device tensor works now; null where it does not tell.
void* current_stream(const TensorArgument& tensor);

}  // namespace attnspan::python
