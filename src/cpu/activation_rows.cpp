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

// Panels on the stack, because the results may go over the inputs, which would keep a single loop from being vectorised.
template <class Act>
INTARSIA_CLONES void activate_backward_row(const float* gate, const float* up, const float* da, std::int64_t n, float* dgate,
                                           float* dup) {
  constexpr std::int64_t kPanel = 64;
  float first[kPanel], second[kPanel];
  for (std::int64_t start = 0; start < n; start += kPanel) {
    const std::int64_t count = n - start < kPanel ? n - start : kPanel;
    for (std::int64_t i = 0; i < count; ++i) {
      const VectorFloat g(gate[start + i]), d(da[start + i]);
      if constexpr (Act::kGated) {
        VectorFloat dg, du;
        Act::gradient(g, VectorFloat(up[start + i]), d, dg, du);
        first[i] = dg.value;
        second[i] = du.value;
      } else {
        first[i] = Act::gradient(g, d).value;
      }
    }
    for (std::int64_t i = 0; i < count; ++i) dgate[start + i] = first[i];
    if constexpr (Act::kGated)
      for (std::int64_t i = 0; i < count; ++i) dup[start + i] = second[i];
  }
}

}  // namespace

void activate(Activation activation, const float* gate, const float* up, std::int64_t n, float* a) {
  dispatch_activation(activation, [&](auto act) { activate_row<decltype(act)>(gate, up, n, a); });
}

void activate_backward(Activation activation, const float* gate, const float* up, const float* da, std::int64_t n, float* dgate,
                       float* dup) {
  dispatch_activation(activation, [&](auto act) { activate_backward_row<decltype(act)>(gate, up, da, n, dgate, dup); });
}

INTARSIA_CLONES void scale(float factor, std::int64_t n, float* row) {
  for (std::int64_t i = 0; i < n; ++i) row[i] *= factor;
}

INTARSIA_CLONES float dot(const float* x, const float* y, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;  // as many running sums, so that the order is the same with any vector width
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  for (std::int64_t lane = 0; i < n; ++i, ++lane) sums[lane] += x[i] * y[i];
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

}  // namespace intarsia::cpu
