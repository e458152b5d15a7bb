// Weighted sums of rows, column by column, in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/row_io.h"

namespace intarsia::cpu {

constexpr std::int64_t kSumColumns = 256;  // 512 bytes of a bf16 row, and 1 KiB of sums

/// total[c] = sum over r in [first, last) of weight(r) * source(r)[c * step], for c < columns <= kSumColumns.
/// Groups of 128 rows are summed first, and the groups then added in order: the fp32 error stays that of short sums.
template <class T, class Source, class Weight>
void sum_rows(std::int64_t first, std::int64_t last, std::int64_t step, std::int64_t columns, Source&& source, Weight&& weight,
              float* total) {
  constexpr std::int64_t kGroup = 128;
  float sum[kSumColumns];
  std::fill_n(total, columns, 0.0f);
  for (std::int64_t group = first; group < last; group += kGroup) {
    std::fill_n(sum, columns, 0.0f);
    for (std::int64_t r = group; r < std::min(last, group + kGroup); ++r)
      add_scaled<T>(weight(r), source(r), step, columns, sum);
    add_scaled<float>(1.0f, sum, 1, columns, total);
  }
}

}  // namespace intarsia::cpu
