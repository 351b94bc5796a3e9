#include "options.hpp"

#include "attnspan/error.hpp"

namespace attnspan::python {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& found, const std::string& expected) {
  throw Error(ErrorCode::invalid_argument, name, "found " + found + ", expected " + expected);
}

std::string type_text(PyObject* value) { return std::string("a value of type ") + Py_TYPE(value)->tp_name; }

Diagonal to_diagonal(PyObject* value, const char* name) {
  if (PyUnicode_Check(value)) {
    if (PyUnicode_CompareWithASCIIString(value, "bottom-right") == 0) return Diagonal::bottom_right();
    if (PyUnicode_CompareWithASCIIString(value, "top-left") == 0) return Diagonal::top_left();
    const char* text = PyUnicode_AsUTF8(value);
    refuse(name, std::string("'") + (text != nullptr ? text : "?") + "'",
           "'bottom-right', 'top-left' or an integer");
  }
  return Diagonal::at(to_int(value, name));
}

struct Keyword {
  const char* name;
  void (*set)(Options&, PyObject* value, const char* name);
};

template <Tensor AttentionOptions::*field>
void set_tensor(Options& options, PyObject* value, const char* name) {
  options.options_.*field = options.side_input(value, name);
}
template <int64_t AttentionOptions::*field>
void set_int(Options& options, PyObject* value, const char* name) {
  options.options_.*field = to_int(value, name);
}
template <float AttentionOptions::*field>
void set_float(Options& options, PyObject* value, const char* name) {
  options.options_.*field = static_cast<float>(to_float(value, name));
}
template <bool AttentionOptions::*field>
void set_bool(Options& options, PyObject* value, const char* name) {
  options.options_.*field = to_bool(value, name);
}
void set_diagonal(Options& options, PyObject* value, const char* name) {
  options.options_.diagonal = to_diagonal(value, name);
}

constexpr Keyword kKeywords[] = {
    {"softmax_scale", set_float<&AttentionOptions::softmax_scale>},
    {"softcap", set_float<&AttentionOptions::softcap>},
    {"causal", set_bool<&AttentionOptions::causal>},
    {"diagonal", set_diagonal},
    {"window_left", set_int<&AttentionOptions::window_left>},
    {"window_right", set_int<&AttentionOptions::window_right>},
    {"key_start", set_tensor<&AttentionOptions::key_start>},
    {"key_end", set_tensor<&AttentionOptions::key_end>},
    {"cu_seqlens_q", set_tensor<&AttentionOptions::cu_seqlens_q>},
    {"cu_seqlens_k", set_tensor<&AttentionOptions::cu_seqlens_k>},
    {"seqused_k", set_tensor<&AttentionOptions::seqused_k>},
    {"bias", set_tensor<&AttentionOptions::bias>},
    {"alibi_slopes", set_tensor<&AttentionOptions::alibi_slopes>},
    {"sinks", set_tensor<&AttentionOptions::sinks>},
    {"nan_guard", set_bool<&AttentionOptions::nan_guard>},
};
constexpr size_t kKeywordCount = sizeof(kKeywords) / sizeof(kKeywords[0]);

// Keywords of a call are interned strings: usually a comparison of addresses finds the row.
const Keyword& keyword_named(PyObject* name) {
  static const std::array<PyObject*, kKeywordCount> interned = [] {
    std::array<PyObject*, kKeywordCount> names{};
    for (size_t i = 0; i < kKeywordCount; ++i) names[i] = PyUnicode_InternFromString(kKeywords[i].name);
    return names;
  }();
  for (size_t i = 0; i < kKeywordCount; ++i) {
    if (interned[i] == name) return kKeywords[i];
  }
  for (size_t i = 0; i < kKeywordCount; ++i) {
    if (PyUnicode_Compare(interned[i], name) == 0) return kKeywords[i];
  }
  const char* text = PyUnicode_AsUTF8(name);
  throw nb::type_error(
      (std::string("unexpected keyword argument '") + (text != nullptr ? text : "?") + "'").c_str());
}

}  // namespace

bool to_bool(PyObject* value, const char* name) {
  if (value == Py_True) return true;
  if (value == Py_False) return false;
  refuse(name, type_text(value), "True or False");
}

int64_t to_int(PyObject* value, const char* name) {
  PyObject* index = PyBool_Check(value) ? nullptr : PyNumber_Index(value);  // ints, NumPy's ints
  if (index == nullptr) {
    PyErr_Clear();
    refuse(name, type_text(value), "an integer");
  }
  const long long result = PyLong_AsLongLong(index);
  Py_DECREF(index);
  if (result == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse(name, "an integer beyond 64 bits", "one within");
  }
  return result;
}

double to_float(PyObject* value, const char* name) {
  const double result = PyBool_Check(value) ? -1.0 : PyFloat_AsDouble(value);
  if (PyBool_Check(value) || (result == -1.0 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    refuse(name, type_text(value), "a number");
  }
  return result;
}

Options::Options(const nb::kwargs& keywords) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(keywords.ptr(), &position, &key, &value) != 0) {
    const Keyword& keyword = keyword_named(key);
    if (value != Py_None) keyword.set(*this, value, keyword.name);
  }
}

const Tensor& Options::side_input(PyObject* value, const char* name) {
  std::optional<SideInput>& slot = side_inputs_[side_input_count_++];
  slot.emplace(value, name);
  return slot->tensor.view();
}

void Options::check_device(const TensorArgument& query) const {
  for (size_t i = 0; i < side_input_count_; ++i) {
    check_same_device(side_inputs_[i]->tensor, side_inputs_[i]->name, query);
  }
}

void check_same_device(const TensorArgument& tensor, const char* name, const TensorArgument& query) {
  const auto text = [](const TensorArgument& argument) {
    const Device device = argument.view().device;
    const std::string kind = name_of(device);
    return device == Device::cpu ? kind : kind + ":" + std::to_string(argument.device_id());
  };
  if (tensor.view().device != query.view().device || tensor.device_id() != query.device_id()) {
    refuse(name, "a tensor on " + text(tensor), "one on " + text(query) + ", where query is");
  }
}

}  // namespace attnspan::python
