// The fixed-order sum of one token, shared by combine and by the layer, whose rows live in a chunk of their own numbering.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/row_io.h"

namespace intarsia::cpu {

/// One row to be added: s * row. A null row is skipped.
template <class T>
struct ScaledRow {
  const T* row = nullptr;
  float score = 1.0f;
};

/// y = addend + sum over i in [0, terms) of term(i), in that order, in fp32, rounded once. term(i) gives a ScaledRow<T>.
/// `addend` may be null, or y itself. The steps are those between columns.
template <class T, class Term>
void combine_token(std::int64_t hidden, std::int64_t terms, Term&& term, std::int64_t row_step, const T* addend,
                   std::int64_t addend_step, T* y, std::int64_t y_step) {
  constexpr std::int64_t kColumns = 1024;  // 4 KiB of sums: stays in the first-level cache beside the rows' own lines
  float sum[kColumns];
  for (std::int64_t first = 0; first < hidden; first += kColumns) {
    const std::int64_t n = std::min(kColumns, hidden - first);
    if (addend) widen(addend + first * addend_step, addend_step, n, sum);
    else std::fill_n(sum, n, 0.0f);
    for (std::int64_t i = 0; i < terms; ++i) {
      const ScaledRow<T> scaled = term(i);
      if (scaled.row) add_scaled(scaled.score, scaled.row + first * row_step, row_step, n, sum);
    }
    narrow(sum, n, y + first * y_step, y_step);
  }
}

}  // namespace intarsia::cpu
