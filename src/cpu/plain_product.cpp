#include "cpu/plain_product.h"

#include <algorithm>

#include "cpu/clones.h"

namespace intarsia::cpu {
namespace {

constexpr std::int64_t kTileRows = 4, kTileColumns = 32;  // 8 to 16 vector registers of sums

template <bool kWhole>
inline __attribute__((always_inline)) void tile(std::int64_t rows, std::int64_t columns, std::int64_t n, std::int64_t k,
                                                const float* a, const float* b, float* c, std::int64_t c_step,
                                                bool accumulate) {
  const std::int64_t m_end = kWhole ? kTileRows : rows, n_end = kWhole ? kTileColumns : columns;
  float sum[kTileRows][kTileColumns] = {};
  for (std::int64_t p = 0; p < k; ++p)
    for (std::int64_t i = 0; i < m_end; ++i)
      for (std::int64_t j = 0; j < n_end; ++j) sum[i][j] += a[i * k + p] * b[p * n + j];
  for (std::int64_t i = 0; i < m_end; ++i)
    for (std::int64_t j = 0; j < n_end; ++j) c[i * c_step + j] = (accumulate ? c[i * c_step + j] : 0.0f) + sum[i][j];
}

}  // namespace

INTARSIA_CLONES void plain_product(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c,
                                   std::int64_t c_step, bool accumulate) {
  for (std::int64_t j = 0; j < n; j += kTileColumns) {
    for (std::int64_t i = 0; i < m; i += kTileRows) {
      const std::int64_t rows = std::min(kTileRows, m - i), columns = std::min(kTileColumns, n - j);
      if (rows == kTileRows && columns == kTileColumns)
        tile<true>(rows, columns, n, k, a + i * k, b + j, c + i * c_step + j, c_step, accumulate);
      else tile<false>(rows, columns, n, k, a + i * k, b + j, c + i * c_step + j, c_step, accumulate);
    }
  }
}

}  // namespace intarsia::cpu
