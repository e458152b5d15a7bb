// Tensor maps of expert weights and of row buffers.
#pragma once

#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/weight_half.h"

namespace intarsia::cuda::sm90 {

inline CUtensorMap weight_map(const WeightHalf& h, int box_inner, int box_rows) {
  return make_map(matrices_of(h, box_inner, box_rows));
}

inline CUtensorMap rows_map(const TensorView& v, std::int64_t first, std::int64_t columns, int box_rows = 64) {
  return make_map(rows_of(v, first, columns, box_rows));
}

}  // namespace intarsia::cuda::sm90
