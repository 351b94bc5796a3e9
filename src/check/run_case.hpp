#pragma once
// One case on one backend, measured against the reference.

#include <string>

#include "check/case.hpp"

namespace attnspan::check {

enum class Verdict { pass, miss, unsupported };

struct CaseResult {
  Verdict verdict = Verdict::pass;
  std::string message;     // why not: the first difference, or the reason of supports()
  double error = 0;        // of out, or the worst gradient, relative to its tolerance
  double plain_error = 0;  // of out, or of the same gradient: the plain implementation's, absolute
  double seconds = 0;      // of the backend's call
};

CaseResult run_forward(const Case& c, const Execution& execution);
CaseResult run_backward(const Case& c, const Execution& execution);

}  // namespace attnspan::check
