// What every expert operation reads: the rows of an expert, the scores of a row, and a weight or bias in one plain form,
// whatever the caller's layout: a matrix (out, in) of doubles whose out axis is [gate, up].
#pragma once

#include "base/rows.h"
#include "reference/element.h"

namespace intarsia::reference {

inline std::int64_t expert_count(const TensorView& expert_offsets) { return expert_offsets.size(0) - 1; }

/// body(r) for every row r of expert e.
template <class Body>
void for_each_row(const TensorView& expert_offsets, std::int64_t e, Body&& body) {
  for (std::int64_t r = load_integer(expert_offsets, e); r < load_integer(expert_offsets, e + 1); ++r) body(r);
}

/// Row of x (or dy) that row r reads.
inline std::int64_t source_row(const TensorView& row_token, std::int64_t r) {
  return row_token.defined() ? load_integer(row_token, r) : r;
}

/// The score of row r: scores (T, K) through row_slot, scores (R) directly, 1 without scores.
inline double load_score(const TensorView& scores, const TensorView& row_slot, std::int64_t r) {
  if (!scores.defined()) return 1;
  if (scores.rank == 1) return load(scores, r);
  const std::int64_t slot = load_integer(row_slot, r);
  return load(scores, slot / scores.size(1), slot % scores.size(1));
}

inline void store_score(const TensorView& scores, const TensorView& row_slot, std::int64_t r, double value) {
  if (scores.rank == 1) return store(scores, value, r);
  const std::int64_t slot = load_integer(row_slot, r);
  store(scores, value, slot / scores.size(1), slot % scores.size(1));
}

/// Place on the caller's out axis of column j of [gate, up]; `columns` is the length of that axis.
inline std::int64_t out_place(std::int64_t gate_block, std::int64_t columns, std::int64_t j) {
  if (gate_block == 0) return j;
  const GateOrder order(gate_block, columns / 2);
  return j < order.width ? order.gate(j) : order.up(j - order.width);
}

/// Columns of [gate, up] (or of a plain out axis) that the weight has.
inline std::int64_t out_columns(const Weights& w) { return w.weight.size(w.transposed ? 2 : 1) * (w.second.defined() ? 2 : 1); }

/// The tensor and the indices that hold element (e, j, h) of [gate, up] x in: body(tensor, i0, i1, i2).
template <class Body>
decltype(auto) at_weight(const Weights& w, std::int64_t e, std::int64_t j, std::int64_t h, Body&& body) {
  const std::int64_t columns = out_columns(w);
  const bool in_second = w.second.defined() && j >= columns / 2;
  const std::int64_t out = w.second.defined() ? j % (columns / 2) : out_place(w.gate_block, columns, j);
  const TensorView& tensor = in_second ? w.second : w.weight;
  return w.transposed ? body(tensor, e, h, out) : body(tensor, e, out, h);
}

using Matrix = std::vector<Vector>;

/// Expert e's weight: one Vector of `in` elements per column of [gate, up].
inline Matrix load_weight(const Weights& w, std::int64_t e) {
  const std::int64_t in = w.weight.size(w.transposed ? 1 : 2);
  Matrix matrix(static_cast<std::size_t>(out_columns(w)), Vector(static_cast<std::size_t>(in)));
  for (std::size_t j = 0; j < matrix.size(); ++j)
    for (std::size_t h = 0; h < matrix[j].size(); ++h)
      matrix[j][h] = at_weight(w, e, static_cast<std::int64_t>(j), static_cast<std::int64_t>(h),
                               [](const TensorView& v, auto... index) { return load(v, index...); });
  return matrix;
}

/// Expert e's bias in the order of [gate, up]; zeros without one. With gate and up in two tensors gate_block is 0.
inline Vector load_bias(const TensorView& bias, std::int64_t gate_block, std::int64_t e, std::int64_t columns) {
  Vector vector(static_cast<std::size_t>(columns), 0.0);
  if (!bias.defined()) return vector;
  for (std::size_t j = 0; j < vector.size(); ++j)
    vector[j] = load(bias, e, out_place(gate_block, columns, static_cast<std::int64_t>(j)));
  return vector;
}

/// gradient = value, or gradient += value with one rounding.
template <class... Index>
void store_gradient(const TensorView& gradient, bool accumulate, double value, Index... index) {
  store(gradient, accumulate ? load(gradient, index...) + value : value, index...);
}

inline void store_weight_gradient(const Weights& dw, std::int64_t e, const Matrix& gradient, bool accumulate) {
  for (std::size_t j = 0; j < gradient.size(); ++j)
    for (std::size_t h = 0; h < gradient[j].size(); ++h)
      at_weight(dw, e, static_cast<std::int64_t>(j), static_cast<std::int64_t>(h),
                [&](const TensorView& v, auto... index) { store_gradient(v, accumulate, gradient[j][h], index...); });
}

inline void store_bias_gradient(const TensorView& db, std::int64_t gate_block, std::int64_t e, const Vector& gradient,
                                bool accumulate) {
  const auto columns = static_cast<std::int64_t>(gradient.size());
  for (std::int64_t j = 0; j < columns; ++j)
    store_gradient(db, accumulate, gradient[static_cast<std::size_t>(j)], e, out_place(gate_block, columns, j));
}

/// W v, or v W (W transposed times v).
inline Vector times(const Matrix& w, const Vector& v) {
  Vector result;
  for (const Vector& row : w) result.push_back(dot(row, v));
  return result;
}

inline Vector transposed_times(const Matrix& w, const Vector& v, std::size_t columns) {
  Vector result(columns, 0.0);
  for (std::size_t j = 0; j < w.size(); ++j)
    for (std::size_t h = 0; h < columns; ++h) result[h] += v[j] * w[j][h];
  return result;
}

/// m += factor * a b^T
inline void add_outer(Matrix& m, double factor, const Vector& a, const Vector& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < b.size(); ++j) m[i][j] += factor * a[i] * b[j];
}

inline Vector scaled(double factor, Vector v) {
  for (double& value : v) value *= factor;
  return v;
}

inline void add(Vector& sum, double factor, const Vector& v) {
  for (std::size_t i = 0; i < v.size(); ++i) sum[i] += factor * v[i];
}

}  // namespace intarsia::reference
