#include "check/compare.hpp"

#include <cmath>
#include <sstream>

namespace attnspan::check {
namespace {

// Half the distance of two neighbours, relative.
double unit_roundoff(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

std::string place(const Tensor& t, int64_t index) {
  std::string text;
  for (int i = t.rank - 1; i >= 0; --i) {
    text = std::to_string(index % t.shape[i]) + (text.empty() ? "" : ", ") + text;
    index /= t.shape[i];
  }
  return "[" + text + "]";
}

}  // namespace

Comparison compare(const std::string& name, const Buffer& result, const Buffer& reference,
                   const Buffer& plain, DType dtype, double slack, double noise) {
  Comparison c;
  double largest = 0;
  int64_t worst = 0;
  const int64_t n = reference.tensor().numel();
  for (int64_t i = 0; i < n; ++i) {
    const double expected = reference.get(i), found = result.get(i);
    if (!std::isfinite(expected) || !std::isfinite(found)) {
      const bool same = expected == found || (std::isnan(expected) && std::isnan(found));
      if (!same && c.ok) {
        c.ok = false;
        std::ostringstream text;
        text << name << place(reference.tensor(), i) << " = " << found << ", expected " << expected;
        c.message = text.str();
      }
      continue;
    }
    if (!std::isfinite(plain.get(i)) && c.ok) {
      c.ok = false;
      c.message = name + place(reference.tensor(), i) + ": the plain implementation is not finite";
      continue;
    }
    largest = std::max(largest, std::abs(expected));
    c.plain = std::max(c.plain, std::abs(plain.get(i) - expected));
    if (std::abs(found - expected) > c.error) {
      c.error = std::abs(found - expected);
      worst = i;
    }
  }
  // The result is rounded once by itself and the reference once: two half units. Sums of f32 in another order
  // than the plain ones add a few more; 8 units of f32 cover rows whose plain error is 0 by luck.
  c.tolerance = 2 * c.plain + largest * (2 * unit_roundoff(dtype) + 8 * 0x1p-24 + slack) + noise + 1e-37;
  if (c.ok && !(c.error <= c.tolerance)) {
    c.ok = false;
    std::ostringstream text;
    text << name << place(reference.tensor(), worst) << " = " << result.get(worst) << ", expected "
         << reference.get(worst) << ": error " << c.error << " over the tolerance " << c.tolerance
         << " (plain implementation: " << c.plain << ")";
    c.message = text.str();
  }
  return c;
}

}  // namespace attnspan::check
