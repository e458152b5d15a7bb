// One element of a view, of any dtype and with any strides, as a double (or as an integer); rounding happens in `store` alone.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "base/dispatch.h"
#include "intarsia/types.h"

namespace intarsia::reference {

template <class... Index>
std::int64_t element(const TensorView& v, Index... index) {
  std::int64_t place = 0;
  int axis = 0;
  ((place += static_cast<std::int64_t>(index) * v.step(axis++)), ...);
  return place;
}

template <class... Index>
double load(const TensorView& v, Index... index) {
  const std::int64_t i = element(v, index...);
  switch (v.dtype) {
    case DType::float64: return v.as<double>()[i];
    case DType::float32: return v.as<float>()[i];
    case DType::bfloat16: return v.as<bfloat16>()[i];
    case DType::float16: return v.as<float16>()[i];
    case DType::int64: return static_cast<double>(v.as<std::int64_t>()[i]);
    case DType::int32: return v.as<std::int32_t>()[i];
    case DType::boolean: return v.as<std::uint8_t>()[i] != 0;
  }
  return 0;
}

template <class... Index>
std::int64_t load_integer(const TensorView& v, Index... index) {
  const std::int64_t i = element(v, index...);
  return v.dtype == DType::int64 ? v.as<std::int64_t>()[i] : v.as<std::int32_t>()[i];
}

template <class... Index>
void store(const TensorView& v, double value, Index... index) {
  const std::int64_t i = element(v, index...);
  switch (v.dtype) {
    case DType::float64: v.as<double>()[i] = value; return;
    case DType::float32: v.as<float>()[i] = static_cast<float>(value); return;
    case DType::bfloat16: v.as<bfloat16>()[i] = bfloat16(static_cast<float>(value)); return;
    case DType::float16: v.as<float16>()[i] = float16(static_cast<float>(value)); return;
    case DType::int64: v.as<std::int64_t>()[i] = static_cast<std::int64_t>(value); return;
    case DType::int32: v.as<std::int32_t>()[i] = static_cast<std::int32_t>(value); return;
    case DType::boolean: v.as<std::uint8_t>()[i] = value != 0; return;
  }
}

using Vector = std::vector<double>;

/// Row i of a rank-2 view.
inline Vector load_row(const TensorView& v, std::int64_t i) {
  Vector row(static_cast<std::size_t>(v.size(1)));
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = load(v, i, j);
  return row;
}

inline void store_row(const TensorView& v, const Vector& row, std::int64_t i) {
  for (std::size_t j = 0; j < row.size(); ++j) store(v, row[j], i, j);
}

inline void fill(const TensorView& v, double value) {
  if (v.rank == 1) {
    for (std::int64_t i = 0; i < v.size(0); ++i) store(v, value, i);
  } else {
    for (std::int64_t i = 0; i < v.size(0); ++i)
      for (std::int64_t j = 0; j < v.size(1); ++j) store(v, value, i, j);
  }
}

inline double dot(const Vector& a, const Vector& b) { return std::transform_reduce(a.begin(), a.end(), b.begin(), 0.0); }

}  // namespace intarsia::reference
