// What TMA is told of a tensor, as plain numbers: dimensions, strides and box of rank 4, innermost first. tensor_map.h encodes
// them; the algebra is tested on the CPU (tests/cpp/tensor_map_test.cpp). A box at coordinates c covers c .. c + box - 1 in
// every dimension; element (i0, i1, i2, i3) lies at data + i0 * size + i1 * strides[0] + ... modulo 2^64, and where a
// coordinate is outside 0 .. dims - 1 a load gives zero and a store is dropped.
//
//   rows      {columns, rows of one expert, fold, fold}: a ragged row buffer. A box at (column, RaggedRow of row r) covers the
//             expert's rows r .., and rows past its end are outside the tensor. No descriptor is edited for an expert. The
//             trick: dimension 1 has kRaggedRows rows of stride s, dimension 2 the stride 2^34 - s, dimension 3 the stride s;
//             with coordinate kRaggedRows in dimension 2, 2^30 * 2^34 = 2^64 vanishes and the address is base + (first + r) *
//             s.
//   matrices  {inner, block, blocks, experts}: expert weights (or their gradients) as matrices; the outer axis in blocks, so
//             that gate and up rows that alternate in any pattern are two plain maps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/host_device.h"
#include "intarsia/types.h"

namespace intarsia::cuda::sm90 {

struct MapLayout {
  const void* data;
  DType dtype;
  std::uint64_t dims[4];
  std::uint64_t strides[3];  ///< bytes, of dimensions 1 to 3
  std::uint32_t box[4];
};

inline constexpr int kRaggedRows = 1 << 30;

/// Coordinates 1 to 3 of row `r` of the expert whose `rows` rows begin at `first_row`.
struct RaggedRow {
  int row, fold, last;
  INTARSIA_HOST_DEVICE constexpr RaggedRow(int first_row, int rows, int r)
      : row(kRaggedRows - rows + r), fold(kRaggedRows), last(first_row + rows) {}
};

struct RowsMap {
  const void* data;
  DType dtype;
  std::int64_t columns, step;  ///< elements; step * size must be a multiple of 16 bytes
  int box_columns, box_rows;
};

struct MatricesMap {
  const void* data;
  DType dtype;
  std::int64_t inner, outer, experts;  ///< elements
  std::int64_t block;                  ///< rows of a block, `outer` when there is one
  std::int64_t row_step, block_step, expert_step;
  int box_inner, box_rows;  ///< the box spans min(block, box_rows) rows of box_rows / that many blocks
};

inline MapLayout layout_of(const RowsMap& r) {
  constexpr std::uint64_t kFold = 0x7fff0000u, kWrap = std::uint64_t{1} << 34;
  const std::uint64_t row = static_cast<std::uint64_t>(r.step) * size_of(r.dtype);
  return {r.data,
          r.dtype,
          {static_cast<std::uint64_t>(r.columns), kRaggedRows, kFold, kFold},
          {row, kWrap - row, row},
          {static_cast<std::uint32_t>(r.box_columns), static_cast<std::uint32_t>(r.box_rows), 1, 1}};
}

inline MapLayout layout_of(const MatricesMap& m) {
  const auto count = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const auto bytes = [&](std::int64_t step) { return count(step) * size_of(m.dtype); };
  const std::int64_t rows = std::min<std::int64_t>(m.block, m.box_rows), blocks = m.box_rows / rows;
  const bool blocked = m.block < m.outer;
  // A dimension of one block still needs a stride that the encoder accepts; any multiple of 16 will do.
  return {m.data,
          m.dtype,
          {count(m.inner), count(m.block), count((m.outer + m.block - 1) / m.block), count(m.experts)},
          {bytes(m.row_step), bytes(blocked ? m.block_step : m.row_step), bytes(m.experts > 1 ? m.expert_step : m.row_step)},
          {static_cast<std::uint32_t>(m.box_inner), static_cast<std::uint32_t>(blocked ? rows : m.box_rows),
           static_cast<std::uint32_t>(blocked ? blocks : 1), 1}};
}

}  // namespace intarsia::cuda::sm90
