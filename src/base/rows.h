// Reading lists, scores and weights the same way in every backend.
#pragma once

#include <cstdint>

#include "intarsia/config.h"
#include "intarsia/types.h"

namespace intarsia {

/// Address of element (i, j) of a rank-2 view.
template <class T>
T* at(const TensorView& v, std::int64_t i, std::int64_t j) {
  return v.as<T>() + i * v.step(0) + j * v.step(1);
}

/// expert_offsets, row_token and row_slot are contiguous int32 (checked by api); an absent list is a null pointer.
inline const std::int32_t* list(const TensorView& v) { return v.defined() ? v.as<const std::int32_t>() : nullptr; }

/// Index into the flat scores of row r: through row_slot for (T, K) scores, r itself for (R) scores.
struct ScoreIndex {
  const std::int32_t* slot = nullptr;
  ScoreIndex(const TensorView& scores, const TensorView& row_slot) : slot(scores.rank == 2 ? list(row_slot) : nullptr) {}
  std::int64_t operator()(std::int64_t row) const { return slot ? slot[row] : row; }
};

/// Place of gate i and up i along the out axis of a weight (or bias) with `width` gates; see Weights::gate_block.
struct GateOrder {
  std::int64_t block, width;
  GateOrder(std::int64_t gate_block, std::int64_t width_) : block(gate_block > 0 ? gate_block : width_), width(width_) {}
  bool concatenated() const { return block == width; }
  std::int64_t gate(std::int64_t i) const { return i / block * 2 * block + i % block; }
  std::int64_t up(std::int64_t i) const { return gate(i) + block; }
};

/// One expert's weight as a matrix (out, in) with two strides, whatever `transposed` says.
struct WeightMatrix {
  std::byte* data;
  std::int64_t out_step, in_step;
};

inline WeightMatrix expert_weight(const TensorView& w, bool transposed, std::int64_t expert) {
  auto* base = static_cast<std::byte*>(w.data) + expert * w.step(0) * static_cast<std::int64_t>(size_of(w.dtype));
  return transposed ? WeightMatrix{base, w.step(2), w.step(1)} : WeightMatrix{base, w.step(1), w.step(2)};
}

}  // namespace intarsia
