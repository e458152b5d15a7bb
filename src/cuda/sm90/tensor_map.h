// Tensor maps (CUtensorMap): what TMA knows of a tensor. Every map here has rank 4, 16-bit or fp32 elements, a 128-byte
// swizzle.
//
//   rows      {columns, rows of one expert, fold, fold}: a ragged row buffer. A box at (column, kRaggedRows - count + r,
//   kRaggedRows,
//             first + count) covers rows r .. of the expert whose `count` rows begin at `first`, and rows past its end are
//             outside the tensor: loads give zeros, stores are dropped. No descriptor is edited for an expert. The trick:
//             dimension 1 has kRaggedRows rows of stride s, dimension 2 the stride 2^34 - s, dimension 3 the stride s; with
//             coordinate kRaggedRows in dimension 2, 2^30 * 2^34 = 2^64 vanishes and the address is base + (first + r) * s.
//   matrices  {inner, block, blocks, experts}: expert weights (or their gradients) as matrices; the outer axis in blocks, so
//   that
//             gate and up rows that alternate in any pattern are two plain maps.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "intarsia/types.h"

namespace intarsia::cuda::sm90 {

inline constexpr int kRaggedRows = 1 << 30;

struct RowsMap {
  const void* data;
  DType dtype;
  std::int64_t columns, step;  ///< elements; step * size must be a multiple of 16 bytes
  int box_columns, box_rows;
};
CUtensorMap make_map(const RowsMap& rows);

struct MatricesMap {
  const void* data;
  DType dtype;
  std::int64_t inner, outer, experts;  ///< elements
  std::int64_t block;                  ///< rows of a block, `outer` when there is one
  std::int64_t row_step, block_step, expert_step;
  int box_inner, box_rows;  ///< the box spans min(block, box_rows) rows of box_rows / that many blocks
};
CUtensorMap make_map(const MatricesMap& matrices);

}  // namespace intarsia::cuda::sm90
