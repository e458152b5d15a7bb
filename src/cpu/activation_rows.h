// The activations on rows of fp32, vectorised, and the two sums over a row that backward needs.
#pragma once

#include <cstdint>

#include "intarsia/config.h"

namespace intarsia::cpu {

/// a[i] = act(gate[i], up[i]), or act(gate[i]) for a plain activation.
void activate(Activation activation, const float* gate, const float* up, std::int64_t n, float* a);

/// The same with the gradients of gate and up (plain: of gate alone) for the gradient score * da of a. No two rows overlap.
void activate_backward(Activation activation, const float* gate, const float* up, float score, const float* da, std::int64_t n,
                       float* a, float* dgate, float* dup);

/// row[i] *= factor
void scale(float factor, std::int64_t n, float* row);

/// sum of x[i] * y[i], in an order that depends on n alone
float dot(const float* x, const float* y, std::int64_t n);

}  // namespace intarsia::cpu
