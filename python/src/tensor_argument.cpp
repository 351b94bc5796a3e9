#include "tensor_argument.hpp"

#include <unordered_map>

#include "attnspan/error.hpp"

namespace attnspan::python {
namespace {

using dlpack::DLTensor;
using dlpack::ExchangeApi;

[[noreturn]] void refuse(const char* name, const std::string& found, const std::string& expected) {
  throw Error(ErrorCode::invalid_argument, name, "found " + found + ", expected " + expected);
}

const char* const kKnownDTypes = "float32, float16, bfloat16 or int32";

DType dtype_of(const dlpack::DLDataType& type, const char* name) {
  if (type.lanes == 1) {
    if (type.code == dlpack::kFloat && type.bits == 32) return DType::f32;
    if (type.code == dlpack::kFloat && type.bits == 16) return DType::f16;
    if (type.code == dlpack::kBfloat && type.bits == 16) return DType::bf16;
    if (type.code == dlpack::kInt && type.bits == 32) return DType::i32;
  }
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string kind =
      type.code < 7 ? kinds[type.code] : "type code " + std::to_string(type.code) + " of ";
  refuse(name, "dtype " + (type.code == dlpack::kBool ? kind : kind + std::to_string(type.bits)),
         kKnownDTypes);
}

Device device_of(const dlpack::DLDevice& device, const char* name) {
  switch (device.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return Device::cpu;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return Device::cuda;
    case dlpack::kMetal:
      return Device::metal;
    case dlpack::kWebGpu:
      return Device::webgpu;
    default:
      refuse(name, "a tensor on DLPack device type " + std::to_string(device.device_type),
             "one on cpu, cuda, metal or webgpu");
  }
}

void check_rank(int64_t rank, const char* name) {
  if (rank < 1 || rank > kMaxRank) {
    refuse(name, "rank " + std::to_string(rank), "1 to " + std::to_string(kMaxRank) + " dimensions");
  }
}

// The exchange API of a type, or null. Types live long and are few: each is asked once.
const ExchangeApi* exchange_api(PyTypeObject* type) {
  static std::unordered_map<PyTypeObject*, const ExchangeApi*> known;  // guarded by the GIL
  static PyTypeObject* last_type = nullptr;
  static const ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  auto found = known.find(type);
  if (found == known.end()) {
    const ExchangeApi* api = nullptr;
    PyObject* capsule =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (capsule != nullptr && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
      api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      if (api->header.version.major != 1) api = nullptr;
    }
    PyErr_Clear();
    Py_XDECREF(capsule);
    Py_INCREF(type);  // so that its address stays its own
    found = known.emplace(type, api).first;
  }
  last_type = type;
  last_api = found->second;
  return last_api;
}

std::string pending_error_text() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text = "an error";
  if (PyObject* as_text = value != nullptr ? PyObject_Str(value) : nullptr) {
    if (const char* utf8 = PyUnicode_AsUTF8(as_text)) text = utf8;
    Py_DECREF(as_text);
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return text.substr(0, text.find('\n'));
}

// A tensor of PyTorch, asked without importing it.
bool is_torch_tensor(PyObject* object) {
  PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
  PyObject* type = torch != nullptr ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
  const bool yes = type != nullptr && PyObject_IsInstance(object, type) == 1;
  Py_XDECREF(type);
  PyErr_Clear();
  return yes;
}

// Whether __dlpack_device__ names another device than the CPU.
bool lives_on_a_device(PyObject* object) {
  PyObject* device = PyObject_CallMethod(object, "__dlpack_device__", nullptr);
  PyObject* type = device != nullptr ? PySequence_GetItem(device, 0) : nullptr;
  long code = dlpack::kCpu;
  if (type != nullptr) code = PyLong_AsLong(type);
  Py_XDECREF(type);
  Py_XDECREF(device);
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !failed && code != dlpack::kCpu;
}

bool has_dtype_bfloat16(PyObject* object) {
  PyObject* dtype = PyObject_GetAttrString(object, "dtype");
  PyObject* dtype_name = dtype != nullptr ? PyObject_GetAttrString(dtype, "name") : nullptr;
  const bool yes = dtype_name != nullptr && PyUnicode_Check(dtype_name) &&
                   PyUnicode_CompareWithASCIIString(dtype_name, "bfloat16") == 0;
  Py_XDECREF(dtype_name);
  Py_XDECREF(dtype);
  PyErr_Clear();
  return yes;
}

DType dtype_of_format(const Py_buffer& buffer, bool bfloat16_as_uint16, const char* name) {
  const char* format = buffer.format != nullptr ? buffer.format : "B";
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  if (format[0] != '\0' && format[1] == '\0') {
    if (bfloat16_as_uint16 && format[0] == 'H') return DType::bf16;
    if (format[0] == 'f') return DType::f32;
    if (format[0] == 'e') return DType::f16;
    if ((format[0] == 'i' || format[0] == 'l') && buffer.itemsize == 4) return DType::i32;
    if (format[0] == 'd') refuse(name, "dtype float64", kKnownDTypes);
    if (format[0] == 'l' || format[0] == 'q') refuse(name, "dtype int64", kKnownDTypes);
    if (format[0] == '?') refuse(name, "dtype bool", kKnownDTypes);
  }
  refuse(name, std::string("buffer format '") + format + "'", kKnownDTypes);
}

}  // namespace

TensorArgument::TensorArgument(PyObject* object, const char* name, Access access, void* stream)
    : object_(object), name_(name) {
  api_ = exchange_api(Py_TYPE(object));
  if (api_ != nullptr && api_->dltensor_from_py_object_no_sync != nullptr) {
    DLTensor tensor;
    if (api_->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
      refuse(name, "a tensor that its library does not lend (" + pending_error_text() + ")",
             "a dense tensor");
    }
    borrow_dlpack(tensor);
  } else if (PyObject_CheckBuffer(object)) {
    const int flags = PyBUF_RECORDS_RO | (access == Access::write ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &buffer_, flags) != 0) {
      const std::string reason = pending_error_text();
      if (lives_on_a_device(object)) {  // CuPy has buffers for its arrays of host memory alone
        import_capsule(stream, access);
        return;
      }
      PyObject* view =
          has_dtype_bfloat16(object) ? PyObject_CallMethod(object, "view", "s", "uint16") : nullptr;
      if (view == nullptr || PyObject_GetBuffer(view, &buffer_, flags) != 0) {
        PyErr_Clear();
        Py_XDECREF(view);
        refuse(name, "an array that cannot be lent (" + reason + ")",
               access == Access::write ? "a writable array" : "an array of numbers");
      }
      Py_DECREF(view);  // the buffer keeps it
      bfloat16_as_uint16_ = true;
    }
    try {
      borrow_buffer();
    } catch (...) {
      PyBuffer_Release(&buffer_);
      throw;
    }
  } else {
    import_capsule(stream, access);
  }
}

TensorArgument::~TensorArgument() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
  if (managed_versioned_ != nullptr && managed_versioned_->deleter != nullptr) {
    managed_versioned_->deleter(managed_versioned_);
  }
}

void TensorArgument::borrow_dlpack(const DLTensor& source) {
  check_rank(source.ndim, name_);
  tensor_.dtype = dtype_of(source.dtype, name_);
  tensor_.device = device_of(source.device, name_);
  device_id_ = tensor_.device == Device::cpu ? 0 : source.device.device_id;
  tensor_.rank = source.ndim;
  int64_t dense = 1;
  for (int i = source.ndim - 1; i >= 0; --i) {
    tensor_.shape[i] = source.shape[i];
    tensor_.stride[i] = source.strides != nullptr ? source.strides[i] : dense;
    dense *= source.shape[i];
  }
  tensor_.data = source.data;
  tensor_.byte_offset = static_cast<int64_t>(source.byte_offset);
}

void TensorArgument::borrow_buffer() {
  check_rank(buffer_.ndim, name_);
  tensor_.dtype = dtype_of_format(buffer_, bfloat16_as_uint16_, name_);
  tensor_.rank = buffer_.ndim;
  for (int i = 0; i < buffer_.ndim; ++i) {
    tensor_.shape[i] = buffer_.shape[i];
    if (buffer_.strides[i] % buffer_.itemsize != 0) {
      refuse(name_,
             "a stride of " + std::to_string(buffer_.strides[i]) + " bytes in dimension " + std::to_string(i),
             "a multiple of the element's " + std::to_string(buffer_.itemsize));
    }
    tensor_.stride[i] = buffer_.strides[i] / buffer_.itemsize;
  }
  if (reinterpret_cast<uintptr_t>(buffer_.buf) % static_cast<uintptr_t>(buffer_.itemsize) != 0) {
    refuse(name_, "an address that is no multiple of the element's size", "an aligned array");
  }
  tensor_.data = buffer_.buf;
}

// __dlpack__(stream=..., max_version=(1, 1)), or without max_version for producers older than DLPack 1.0.
void TensorArgument::import_capsule(void* stream, Access access) {
  // PyTorch before the exchange API lends no tensor that autograd follows: its detached twin is lent instead.
  PyObject* lender = is_torch_tensor(object_) ? PyObject_CallMethod(object_, "detach", nullptr) : nullptr;
  PyErr_Clear();
  PyObject* method = PyObject_GetAttrString(lender != nullptr ? lender : object_, "__dlpack__");
  Py_XDECREF(lender);  // the method keeps it
  if (method == nullptr) {
    PyErr_Clear();
    refuse(name_, std::string("an object of type ") + Py_TYPE(object_)->tp_name,
           "a NumPy array or a tensor with __dlpack__");
  }
  PyObject* empty = PyTuple_New(0);
  PyObject* options = PyDict_New();
  if (stream != nullptr) {
    PyObject* address = PyLong_FromVoidPtr(stream);
    PyDict_SetItemString(options, "stream", address);
    Py_DECREF(address);
  }
  PyObject* version = Py_BuildValue("(ii)", 1, 1);
  PyDict_SetItemString(options, "max_version", version);
  PyObject* capsule = PyObject_Call(method, empty, options);
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    PyDict_DelItemString(options, "max_version");
    capsule = PyObject_Call(method, empty, options);
  }
  Py_DECREF(version);
  Py_DECREF(options);
  Py_DECREF(empty);
  Py_DECREF(method);
  if (capsule == nullptr) {
    refuse(name_, "a tensor that its library does not lend (" + pending_error_text() + ")", "a dense tensor");
  }
  // A consumer renames the capsule, which passes the duty to call the deleter on to it.
  const DLTensor* tensor = nullptr;
  bool read_only = false;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    managed_versioned_ =
        static_cast<dlpack::DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    tensor = &managed_versioned_->dl_tensor;
    read_only = (managed_versioned_->flags & dlpack::kReadOnly) != 0;
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    managed_ = static_cast<dlpack::DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    tensor = &managed_->dl_tensor;
  }
  Py_DECREF(capsule);
  try {
    if (tensor == nullptr) refuse(name_, "no DLPack capsule from __dlpack__", "one");
    if (read_only && access == Access::write) refuse(name_, "a read-only tensor", "a writable one");
    borrow_dlpack(*tensor);
  } catch (...) {  // the destructor of a half-made object does not run
    if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
    if (managed_versioned_ != nullptr && managed_versioned_->deleter != nullptr) {
      managed_versioned_->deleter(managed_versioned_);
    }
    throw;
  }
}

// ---- new tensors

namespace {

PyObject* new_by_exchange_api(const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype) {
  const Tensor& view = like.view();
  DLTensor prototype{};
  prototype.device.device_type = view.device == Device::cpu    ? dlpack::kCpu
                                 : view.device == Device::cuda ? dlpack::kCuda
                                                               : dlpack::kMetal;
  prototype.device.device_id = like.device_id();
  prototype.ndim = static_cast<int32_t>(shape.size());
  prototype.dtype = {static_cast<uint8_t>(dtype == DType::bf16 ? dlpack::kBfloat : dlpack::kFloat),
                     static_cast<uint8_t>(8 * size_of(dtype)), 1};
  prototype.shape = const_cast<int64_t*>(shape.data());
  dlpack::DLManagedTensorVersioned* managed = nullptr;
  std::string message = "no memory";
  const auto set_error = [](void* context, const char*, const char* text) {
    *static_cast<std::string*>(context) = text;
  };
  if (like.api()->managed_tensor_allocator(&prototype, &managed, &message, set_error) != 0) {
    PyErr_Clear();
    throw Error(ErrorCode::out_of_memory, "out", message.substr(0, message.find('\n')));
  }
  void* object = nullptr;
  if (like.api()->managed_tensor_to_py_object_no_sync(managed, &object) != 0) throw PythonErrorSet{};
  return static_cast<PyObject*>(object);
}

// like.new_empty(shape, dtype=...): PyTorch before the exchange API (2.10).
PyObject* new_by_torch(const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype) {
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* type = torch != nullptr ? PyObject_GetAttrString(torch, dtype == DType::f32   ? "float32"
                                                                    : dtype == DType::f16 ? "float16"
                                                                                          : "bfloat16")
                                    : nullptr;
  PyObject* make = PyObject_GetAttrString(like.object(), "new_empty");
  PyObject* arguments = PyTuple_New(1);
  PyObject* extents = PyTuple_New(static_cast<Py_ssize_t>(shape.size()));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SET_ITEM(extents, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
  }
  PyTuple_SET_ITEM(arguments, 0, extents);
  PyObject* keywords = PyDict_New();
  if (type != nullptr) PyDict_SetItemString(keywords, "dtype", type);
  PyObject* tensor = type != nullptr && make != nullptr ? PyObject_Call(make, arguments, keywords) : nullptr;
  for (PyObject* object : {torch, type, make, arguments, keywords}) Py_XDECREF(object);
  if (tensor == nullptr) throw PythonErrorSet{};
  return tensor;
}

// numpy.empty, made once: NumPy is imported only when an array has to be made.
PyObject* numpy_empty() {
  static PyObject* function = [] {
    PyObject* numpy = PyImport_ImportModule("numpy");
    PyObject* empty = numpy != nullptr ? PyObject_GetAttrString(numpy, "empty") : nullptr;
    Py_XDECREF(numpy);
    if (empty == nullptr) throw PythonErrorSet{};
    return empty;
  }();
  return function;
}

PyObject* numpy_dtype(DType dtype) {
  static PyObject* types[2] = {};
  PyObject*& type = types[dtype == DType::f32 ? 0 : 1];
  if (type == nullptr) {
    PyObject* numpy = PyImport_ImportModule("numpy");
    type = numpy != nullptr ? PyObject_CallMethod(numpy, "dtype", "s", dtype == DType::f32 ? "f4" : "f2")
                            : nullptr;
    Py_XDECREF(numpy);
    if (type == nullptr) throw PythonErrorSet{};
  }
  Py_INCREF(type);
  return type;
}

}  // namespace

PyObject* new_tensor(const TensorArgument& like, const std::vector<int64_t>& shape, DType dtype,
                     const char* name) {
  if (like.api() != nullptr) return new_by_exchange_api(like, shape, dtype);
  const bool is_array = PyObject_CheckBuffer(like.object());
  if (!is_array && is_torch_tensor(like.object())) return new_by_torch(like, shape, dtype);
  if (like.view().device != Device::cpu || (!is_array && dtype == DType::bf16)) {
    refuse(name, "no tensor",
           std::string("one: tensors of type ") + Py_TYPE(like.object())->tp_name +
               " are read here, but only NumPy's and those of libraries with DLPack's "
               "exchange API are made");
  }
  PyObject* type = dtype == DType::bf16 ? PyObject_GetAttrString(like.object(), "dtype") : numpy_dtype(dtype);
  PyObject* extents = PyTuple_New(static_cast<Py_ssize_t>(shape.size()));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SET_ITEM(extents, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
  }
  PyObject* arguments[2] = {extents, type};
  PyObject* array = PyObject_Vectorcall(numpy_empty(), arguments, 2, nullptr);
  Py_DECREF(extents);
  Py_XDECREF(type);
  if (array == nullptr) throw PythonErrorSet{};
  return array;
}

void* current_stream(const TensorArgument& tensor) {
  if (tensor.view().device != Device::cuda) return nullptr;
  void* stream = nullptr;
  if (tensor.api() == nullptr) {
    if (!is_torch_tensor(tensor.object())) return nullptr;
    PyObject* cuda = PyImport_ImportModule("torch.cuda");
    PyObject* current =
        cuda != nullptr ? PyObject_CallMethod(cuda, "current_stream", "i", tensor.device_id()) : nullptr;
    PyObject* address = current != nullptr ? PyObject_GetAttrString(current, "cuda_stream") : nullptr;
    if (address != nullptr) stream = PyLong_AsVoidPtr(address);
    for (PyObject* object : {cuda, current, address}) Py_XDECREF(object);
    PyErr_Clear();
    return stream;
  }
  const auto ask = tensor.api()->current_work_stream;  // may be null
  if (ask != nullptr && ask(dlpack::kCuda, tensor.device_id(), &stream) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  return stream;
}

}  // namespace attnspan::python
