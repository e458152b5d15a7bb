#include "cpu/gemm.h"

#include <algorithm>

#include "base/half.h"
#include "cpu/onednn.h"
#include "cpu/plain_product.h"
#include "cpu/row_io.h"

namespace intarsia::cpu {
namespace {

// Tiles of packed operands: 128 x 512 of A and 512 x 320 of B, in fp32 256 and 640 KiB.
constexpr std::int64_t kRows = 128, kDepth = 512, kColumns = 320;
static_assert((kRows + kColumns) * kDepth * sizeof(float) <= kGemmScratchBytes);

std::int64_t magnitude(std::int64_t value) { return value < 0 ? -value : value; }

/// Whether oneDNN can read this operand in place: one axis of unit stride, the other's stride covering it.
bool in_place(const Matrix& x, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kReach = std::int64_t{1} << 30;  // oneDNN's kernels add 32-bit offsets
  if (std::max(magnitude(x.row_step) * rows, magnitude(x.column_step) * columns) > kReach) return false;
  return (x.column_step == 1 && x.row_step >= columns) || (x.row_step == 1 && x.column_step >= rows);
}

const void* element(DType dtype, const Matrix& x, std::int64_t i, std::int64_t j) {
  const std::int64_t offset = (i * x.row_step + j * x.column_step) * static_cast<std::int64_t>(size_of(dtype));
  return static_cast<const std::byte*>(x.data) + offset;
}

/// Copies the tile at (i, j) into `memory` as float, or as it is when `type` is bfloat16. Its smaller stride stays the inner
/// axis, so that reading is sequential; `row_major` forces rows.
Matrix pack(DType from, DType type, const Matrix& x, std::int64_t i, std::int64_t j, std::int64_t rows, std::int64_t columns,
            bool row_major, std::byte* memory) {
  const bool by_rows = row_major || magnitude(x.column_step) <= magnitude(x.row_step);
  const std::int64_t lines = by_rows ? rows : columns, length = by_rows ? columns : rows;
  const std::int64_t step = by_rows ? x.column_step : x.row_step;
  for (std::int64_t line = 0; line < lines; ++line) {
    const void* source = by_rows ? element(from, x, i + line, j) : element(from, x, i, j + line);
    if (type == DType::bfloat16) {
      const auto* in = static_cast<const bfloat16*>(source);
      auto* out = reinterpret_cast<bfloat16*>(memory) + line * length;
      for (std::int64_t l = 0; l < length; ++l) out[l] = in[l * step];
    } else {
      dispatch_element(from, [&](auto tag) {
        widen(static_cast<const typename decltype(tag)::type*>(source), step, length,
              reinterpret_cast<float*>(memory) + line * length);
      });
    }
  }
  return by_rows ? Matrix{memory, length, 1} : Matrix{memory, 1, length};
}

intarsia_product describe(DType type, std::int64_t m, std::int64_t n, std::int64_t k, const Matrix& a, const Matrix& b,
                          std::int64_t c_step, bool accumulate) {
  const bool a_transposed = a.column_step != 1, b_transposed = b.column_step != 1;
  return {.m = m,
          .n = n,
          .k = k,
          .a_step = a_transposed ? a.column_step : a.row_step,
          .b_step = b_transposed ? b.column_step : b.row_step,
          .c_step = c_step,
          .a_transposed = a_transposed,
          .b_transposed = b_transposed,
          .bfloat16 = type == DType::bfloat16,
          .accumulate = accumulate};
}

}  // namespace

void gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c, std::int64_t c_step,
          bool accumulate, std::byte* scratch) {
  const Onednn& onednn = Onednn::instance();
  const DType type = dtype == DType::bfloat16 && onednn.multiplies_bfloat16() ? DType::bfloat16 : DType::float32;
  const bool pack_a = type != dtype || !onednn.available() || !in_place(a, m, k);
  const bool pack_b = type != dtype || !onednn.available() || !in_place(b, k, n);
  if (!pack_a && !pack_b && onednn.multiply(describe(type, m, n, k, a, b, c_step, accumulate), a.data, b.data, c)) return;

  // Tile by tile, with the operands that need it packed; the plain loops want both, in rows of float.
  std::byte* memory_b = scratch + kRows * kDepth * static_cast<std::int64_t>(sizeof(float));
  const auto tile = [&](const Matrix& x, std::int64_t i, std::int64_t j) {
    return Matrix{element(dtype, x, i, j), x.row_step, x.column_step};
  };
  for (std::int64_t j = 0; j < n; j += kColumns) {
    for (std::int64_t p = 0; p < k; p += kDepth) {
      const std::int64_t columns = std::min(kColumns, n - j), depth = std::min(kDepth, k - p);
      const Matrix tile_b = pack_b ? pack(dtype, type, b, p, j, depth, columns, false, memory_b) : tile(b, p, j);
      for (std::int64_t i = 0; i < m; i += kRows) {
        const std::int64_t rows = std::min(kRows, m - i);
        const Matrix tile_a = pack_a ? pack(dtype, type, a, i, p, rows, depth, false, scratch) : tile(a, i, p);
        const bool add = accumulate || p > 0;
        float* tile_c = c + i * c_step + j;
        if (onednn.available() && onednn.multiply(describe(type, rows, columns, depth, tile_a, tile_b, c_step, add),
                                                  tile_a.data, tile_b.data, tile_c))
          continue;
        const Matrix plain_b = pack(dtype, DType::float32, b, p, j, depth, columns, true, memory_b);
        const Matrix plain_a = pack(dtype, DType::float32, a, i, p, rows, depth, true, scratch);
        plain_product(rows, columns, depth, static_cast<const float*>(plain_a.data), static_cast<const float*>(plain_b.data),
                      tile_c, c_step, add);
      }
    }
  }
}

}  // namespace intarsia::cpu
