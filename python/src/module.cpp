// attnspan._core: the C++ library for Python, without a framework.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "attnspan/error.hpp"
#include "calls.hpp"
#include "registry/registry.hpp"

namespace attnspan::python {
namespace {

// The Python class of an error: attnspan._errors has one for each code.
const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "InvalidArgument";
    case ErrorCode::unsupported:
      return "Unsupported";
    case ErrorCode::unavailable:
      return "Unavailable";
    case ErrorCode::io:
      return "FileError";
    case ErrorCode::out_of_memory:
      return "OutOfMemory";
    case ErrorCode::internal:
      break;
  }
  return "Error";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PythonErrorSet&) {
    // already set
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("attnspan._errors").attr(class_name(error.code()));
    const nb::object value = type(error.what());
    value.attr("argument") = error.argument();
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

nb::list backend_list() {
  nb::list list;
  for (const RegisteredBackend& entry : backends()) {
    nb::dict row;
    row["name"] = entry.name;
    row["available"] = entry.backend != nullptr;
    row["description"] = entry.backend != nullptr ? entry.backend->description() : entry.reason;
    row["device"] =
        entry.backend != nullptr ? nb::object(nb::str(name_of(entry.backend->device()))) : nb::none();
    list.append(row);
  }
  return list;
}

}  // namespace
}  // namespace attnspan::python

NB_MODULE(_core, module) {
  using namespace attnspan::python;
  module.doc() = "The attention of libattnspan for NumPy arrays and DLPack tensors.";
  module.attr("__version__") = ATTNSPAN_VERSION;
  nb::register_exception_translator(translate);

  nb::class_<attnspan::Result>(module, "Result", "Which backend ran, and what it replaced under nan_guard.")
      .def_ro("backend", &attnspan::Result::backend)
      .def_ro("nonfinite_replaced", &attnspan::Result::nonfinite_replaced)
      .def("__repr__", [](const attnspan::Result& result) {
        return "Result(backend='" + result.backend +
               "', nonfinite_replaced=" + std::to_string(result.nonfinite_replaced) + ")";
      });
  module.def(
      "last_result", [] { return last_result(); }, "The Result of this thread's last call.");
  module.def("backend_list", backend_list, nb::sig("def backend_list() -> list[dict[str, typing.Any]]"),
             "Every backend in order of preference: name, available, device, and a description or the reason "
             "why not.");
  bind_attention(module);
  bind_kv_cache(module);
}
