#include "cpu/activation_rows.h"

#include "base/activation.h"
#include "cpu/clones.h"
#include "cpu/vector_float.h"

namespace intarsia::cpu {
namespace {

template <class Act>
INTARSIA_CLONES void activate_row(const float* gate, const float* up, std::int64_t n, float* __restrict a) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (Act::kGated) a[i] = Act::value(VectorFloat(gate[i]), VectorFloat(up[i])).value;
    else a[i] = Act::value(VectorFloat(gate[i])).value;
  }
}

// One loop for a and its gradients, which share the exponential.
template <class Act>
INTARSIA_CLONES void activate_backward_row(const float* __restrict gate, const float* __restrict up, float score,
                                           const float* __restrict da, std::int64_t n, float* __restrict a,
                                           float* __restrict dgate, float* __restrict dup) {
  for (std::int64_t i = 0; i < n; ++i) {
    const VectorFloat g(gate[i]), d(score * da[i]);
    if constexpr (Act::kGated) {
      const VectorFloat u(up[i]);
      VectorFloat dg, du;
      Act::gradient(g, u, d, dg, du);
      a[i] = Act::value(g, u).value;
      dgate[i] = dg.value;
      dup[i] = du.value;
    } else {
      a[i] = Act::value(g).value;
      dgate[i] = Act::gradient(g, d).value;
    }
  }
}

}  // namespace

void activate(Activation activation, const float* gate, const float* up, std::int64_t n, float* a) {
  dispatch_activation(activation, [&](auto act) { activate_row<decltype(act)>(gate, up, n, a); });
}

void activate_backward(Activation activation, const float* gate, const float* up, float score, const float* da, std::int64_t n,
                       float* a, float* dgate, float* dup) {
  dispatch_activation(activation,
                      [&](auto act) { activate_backward_row<decltype(act)>(gate, up, score, da, n, a, dgate, dup); });
}

INTARSIA_CLONES void scale(float factor, std::int64_t n, float* row) {
  for (std::int64_t i = 0; i < n; ++i) row[i] *= factor;
}

INTARSIA_CLONES float dot(const float* x, const float* y, std::int64_t n) {
  constexpr std::int64_t kLanes = 32;  // as many running sums, so that the order is the same with any vector width
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  for (std::int64_t lane = 0; i < n; ++i, ++lane) sums[lane] += x[i] * y[i];
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2)
    for (std::int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

}  // namespace intarsia::cpu
