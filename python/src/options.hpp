#pragma once
// The keyword arguments that describe what is attended to, the same in every call: a table from a name to the
// field of AttentionOptions that it sets.

#include <nanobind/nanobind.h>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "tensor_argument.hpp"

namespace attnspan::python {

namespace nb = nanobind;

// The signature of those keywords, for the stubs.
#define ATTNSPAN_OPTION_SIGNATURE                                                                     \
  "softmax_scale: float | None = None, softcap: float = 0.0, causal: bool = False, "                  \
  "diagonal: typing.Literal['bottom-right', 'top-left'] | int = 'bottom-right', "                     \
  "window_left: int = -1, window_right: int = -1, key_start: object | None = None, "                  \
  "key_end: object | None = None, cu_seqlens_q: object | None = None, "                               \
  "cu_seqlens_k: object | None = None, seqused_k: object | None = None, bias: object | None = None, " \
  "alibi_slopes: object | None = None, sinks: object | None = None, nan_guard: bool = False"

class Options {
 public:
  // Throws TypeError for a name that is none of the table's, Error for a value of the wrong kind.
  explicit Options(const nb::kwargs& keywords);
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  const AttentionOptions& get() const { return options_; }
  // Every tensor among them must be on query's device.
  void check_device(const TensorArgument& query) const;

  // Reads a side input and keeps it alive. `name` must be a literal.
  const Tensor& side_input(PyObject* value, const char* name);

  AttentionOptions options_;

 private:
  static constexpr size_t kMaxSideInputs = 8;
  struct SideInput {
    SideInput(PyObject* object, const char* name_in) : tensor(object, name_in, Access::read), name(name_in) {}
    TensorArgument tensor;
    const char* name;
  };
  std::array<std::optional<SideInput>, kMaxSideInputs> side_inputs_;
  size_t side_input_count_ = 0;
};

// Values of Python, refused by the argument's name when they are of another kind.
bool to_bool(PyObject* value, const char* name);
int64_t to_int(PyObject* value, const char* name);
double to_float(PyObject* value, const char* name);

void check_same_device(const TensorArgument& tensor, const char* name, const TensorArgument& query);

}  // namespace attnspan::python
