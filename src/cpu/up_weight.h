// w_up as its products see it: runs of gates with their ups, in whichever of the layouts of design.md section 6 the caller
// keeps it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rows.h"
#include "cpu/gemm.h"
#include "cpu/row_block.h"
#include "intarsia/config.h"

namespace intarsia::cpu {

/// Gates [first, first + count) and their ups (plain activations: columns of z). Its product has rows [gate, up] of `columns`
/// floats, or, when `interleaved`, the order that the weight has in memory.
struct GateTile {
  std::int64_t first, count, columns;
  bool interleaved;
};

class UpWeight {
 public:
  UpWeight(const Weights& w_up, bool gated);

  std::int64_t width() const { return width_; }      ///< I
  std::int64_t columns() const { return columns_; }  ///< G * I
  bool gated() const { return gated_; }
  /// Whether [gate, up] is the order in memory (of one tensor, or of each of two).
  bool concatenated() const { return !gated_ || w_.second.defined() || order_.concatenated(); }
  const GateOrder& order() const { return order_; }

  /// The tile that starts at gate `first`.
  GateTile tile(std::int64_t first) const;

  /// product (m, tile.columns) = x (m, H) times the tile's rows of the weight, transposed.
  void preactivation(std::int64_t expert, const GateTile& tile, std::int64_t m, Matrix x, std::int64_t hidden, float* product,
                     std::byte* packing) const;

  /// product (m, n) = dz (m, G*I) times columns first, ... of the weight; dz has the weight's own order unless concatenated().
  void input_gradient(std::int64_t expert, std::int64_t first, std::int64_t n, std::int64_t m, const Matrix& dz, float* product,
                      std::byte* packing) const;

 private:
  Matrix part(const TensorView& tensor, std::int64_t expert, std::int64_t first_out, std::int64_t first_in) const;

  Weights w_;
  bool gated_;
  std::int64_t columns_, width_;
  GateOrder order_;
};

/// Splits one row from the weight's order into gates and ups.
void split_gates(const float* row, std::int64_t block, std::int64_t count, float* gate, float* up);

/// The part of a bias that belongs to a tile, as [gate, up] of 2 * count floats (plain: count).
void load_up_bias(const TensorView& b_up, std::int64_t expert, const UpWeight& w_up, const GateTile& tile, float* bias);

/// Rows of dz, [gate, up], in the weight's order: a contiguous (padded(count), 2I) matrix. The padding is zeros.
void interleave_gates(const TensorView& dz, const RowBlock& block, const GateOrder& order, std::byte* to);

}  // namespace intarsia::cpu
