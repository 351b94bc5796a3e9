#pragma once
// A plain same-dtype implementation, as a framework's eager mode computes attention: matrix products
// accumulate in f32, and every intermediate matrix is rounded to the dtype of the inputs. Its error against
// the reference is the yardstick: a backend may have at most twice as much.

#include "core/problem.hpp"

namespace attnspan::check {

void plain_forward(const Problem& problem);
void plain_backward(const Problem& problem);

}  // namespace attnspan::check
