#include "cpu/up_weight.h"

#include <algorithm>

#include "cpu/row_io.h"

namespace intarsia::cpu {
namespace {

std::int64_t out_columns(const Weights& w) { return w.weight.size(w.transposed ? 2 : 1) * (w.second.defined() ? 2 : 1); }

}  // namespace

UpWeight::UpWeight(const Weights& w_up, bool gated)
    : w_(w_up),
      gated_(gated),
      columns_(out_columns(w_up)),
      width_(gated ? columns_ / 2 : columns_),
      order_(w_up.gate_block, width_) {}

GateTile UpWeight::tile(std::int64_t first) const {
  if (!gated_) {
    const std::int64_t count = std::min(kProductColumns, width_ - first);
    return {first, count, count, false};
  }
  constexpr std::int64_t kGates = kProductColumns / 2;
  const std::int64_t block = w_.second.defined() ? width_ : order_.block;
  const std::int64_t end = block <= kGates ? first + kGates / block * block  // whole blocks
                                           : (first / block + 1) * block;    // inside one block
  const std::int64_t count = std::min({kGates, end - first, width_ - first});
  return {first, count, 2 * count, block < count};
}

Matrix UpWeight::part(const TensorView& tensor, std::int64_t expert, std::int64_t first_out, std::int64_t first_in) const {
  const WeightMatrix w = expert_weight(tensor, w_.transposed, expert);
  const std::int64_t offset = first_out * w.out_step + first_in * w.in_step;
  return {w.data + offset * static_cast<std::int64_t>(size_of(tensor.dtype)), w.out_step, w.in_step};
}

void UpWeight::preactivation(std::int64_t expert, const GateTile& tile, std::int64_t m, Matrix x, std::int64_t hidden,
                             float* product, std::byte* packing) const {
  const auto multiply = [&](const TensorView& tensor, std::int64_t first_out, std::int64_t n, float* c) {
    const Matrix w = part(tensor, expert, first_out, 0);
    gemm(tensor.dtype, m, n, hidden, x, {w.data, w.column_step, w.row_step}, c, tile.columns, false, packing);
  };
  if (!gated_) return multiply(w_.weight, tile.first, tile.count, product);
  if (w_.second.defined()) {
    multiply(w_.weight, tile.first, tile.count, product);
    return multiply(w_.second, tile.first, tile.count, product + tile.count);
  }
  // Blocks that the tile covers whole are one run of the weight's rows.
  if (order_.block <= tile.count) return multiply(w_.weight, order_.gate(tile.first), tile.columns, product);
  multiply(w_.weight, order_.gate(tile.first), tile.count, product);
  multiply(w_.weight, order_.up(tile.first), tile.count, product + tile.count);
}

void UpWeight::input_gradient(std::int64_t expert, std::int64_t first, std::int64_t n, std::int64_t m, const Matrix& dz,
                              float* product, std::byte* packing) const {
  const DType dtype = w_.weight.dtype;
  const std::int64_t columns = w_.second.defined() ? width_ : columns_;
  gemm(dtype, m, n, columns, dz, part(w_.weight, expert, 0, first), product, n, false, packing);
  if (!w_.second.defined()) return;
  const auto* ups =
      static_cast<const std::byte*>(dz.data) + width_ * dz.column_step * static_cast<std::int64_t>(size_of(dtype));
  gemm(dtype, m, n, columns, {ups, dz.row_step, dz.column_step}, part(w_.second, expert, 0, first), product, n, true, packing);
}

void split_gates(const float* row, std::int64_t block, std::int64_t count, float* gate, float* up) {
  if (block == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      gate[i] = row[2 * i];
      up[i] = row[2 * i + 1];
    }
    return;
  }
  for (std::int64_t i = 0; i < count; i += block) {
    std::copy_n(row + 2 * i, block, gate + i);
    std::copy_n(row + 2 * i + block, block, up + i);
  }
}

void load_up_bias(const TensorView& b_up, std::int64_t expert, const UpWeight& w_up, const GateTile& tile, float* bias) {
  const GateOrder order(w_up.concatenated() ? 0 : w_up.order().block, w_up.width());
  dispatch_element(b_up.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto load = [&](std::int64_t i) { return static_cast<float>(*at<const T>(b_up, expert, i)); };
    for (std::int64_t i = 0; i < tile.count; ++i) {
      bias[i] = load(w_up.gated() ? order.gate(tile.first + i) : tile.first + i);
      if (w_up.gated()) bias[tile.count + i] = load(order.up(tile.first + i));
    }
  });
}

void interleave_gates(const TensorView& dz, const RowBlock& block, const GateOrder& order, std::byte* to) {
  dispatch_element(dz.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t r = 0; r < block.count; ++r) {
      const T* gate = at<const T>(dz, block.first + r, 0);
      const T* up = gate + order.width;
      T* out = reinterpret_cast<T*>(to) + r * 2 * order.width;
      if (order.block == 1) {
        for (std::int64_t i = 0; i < order.width; ++i) {
          out[2 * i] = gate[i];
          out[2 * i + 1] = up[i];
        }
        continue;
      }
      for (std::int64_t i = 0; i < order.width; i += order.block) {
        std::copy_n(gate + i, order.block, out + 2 * i);
        std::copy_n(up + i, order.block, out + 2 * i + order.block);
      }
    }
    std::fill_n(reinterpret_cast<T*>(to) + block.count * 2 * order.width, (padded(block.count) - block.count) * 2 * order.width,
                T(0.0f));
  });
}

}  // namespace intarsia::cpu
