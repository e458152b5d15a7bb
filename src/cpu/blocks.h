// The GEMM operations on one block of rows of one expert: what the operations loop over and what the layer strings together.
// A block runs on one thread, in one worker's scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/row_block.h"
#include "intarsia/ops.h"
#include "plan/blocking.h"

namespace intarsia::cpu {

/// One worker's part of the workspace (see CpuBlocking).
struct Scratch {
  std::byte *left, *right;
  float* product;
  std::byte* packing;

  Scratch(std::byte* memory, const CpuBlocking& blocking, int worker);
};

/// Where row r of a block goes: row r of `rows`, or row position[r] - origin of it.
struct RowTarget {
  TensorView rows;
  const std::int32_t* position = nullptr;
  std::int64_t origin = 0;

  std::int64_t operator()(std::int64_t r) const { return position ? position[r] - origin : r; }
};

/// op.a is not used: row 0 of `a` is the block's first row. An undefined `a` leaves z as the only output.
void up_forward_block(const UpForward& op, const RowBlock& block, const TensorView& a, const Scratch& scratch);

/// op.a and op.rows are not used: row 0 of `a` is the block's first row, and rows of `a` past the block may be read.
void down_forward_block(const DownForward& op, const RowBlock& block, const TensorView& a, const RowTarget& target,
                        const Scratch& scratch);

/// op.dz may be undefined when only a_scaled or dscores are wanted. dscores of the block's rows are written, no others.
void down_backward_block(const DownBackward& op, const RowBlock& block, const Scratch& scratch);

/// op.dx_rows is not used.
void up_backward_block(const UpBackward& op, const RowBlock& block, const RowTarget& target, const Scratch& scratch);

// ---- what they share

/// Copies rows of `source`, row_token[r] or r for each r of the block, to a contiguous (padded(count), columns) matrix of the
/// same dtype. The padding is zeros: it is multiplied and never read again.
void gather(const TensorView& source, const std::int32_t* row_token, const RowBlock& block, std::byte* to);

/// A view of `rows` rows in a contiguous scratch matrix.
TensorView scratch_rows(std::byte* memory, DType dtype, std::int64_t rows, std::int64_t columns);

/// Rows first, ... of a rank-2 view.
TensorView rows_from(const TensorView& v, std::int64_t first, std::int64_t count);

/// Zeros in rows first, ... of a view whose rows are contiguous.
void zero_rows_from(const TensorView& v, std::int64_t first);

}  // namespace intarsia::cpu
