// An output against what it should be. Tolerances are those of docs/numerics.md: with u the unit of a dtype (bfloat16 2^-7,
// float16 2^-10, float32 1e-6, float64 1e-13) and N the absolute products (or the scale of the case) behind each element,
//   norm(error) <= u norm(N)  for the tensor,   |error| <= 4 u N  for every element of it, so that no single one can hide.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cases/tensors.h"

namespace intarsia::cases {

double unit(DType dtype);

struct Comparison {
  double ratio = 0;     ///< worst error over tolerance; at most 1 passes
  std::string failure;  ///< empty when it passes
};

/// N of one element.
using Scale = std::function<double(std::int64_t)>;

/// Where `expected` was never written, `actual` must not be either; integers and booleans must be equal.
Comparison compare(std::string_view name, const TensorView& actual, const TensorView& expected, const Scale& scale,
                   double unit);

}  // namespace intarsia::cases
