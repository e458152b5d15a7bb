// Tensor maps (CUtensorMap): what TMA knows of a tensor. Every map here has rank 4, 16-bit or fp32 elements, a 128-byte
// swizzle. What they describe: map_layout.h.
#pragma once

#include <cuda.h>

#include "cuda/sm90/map_layout.h"

namespace intarsia::cuda::sm90 {

CUtensorMap encode(const MapLayout& layout);

inline CUtensorMap make_map(const RowsMap& rows) { return encode(layout_of(rows)); }
inline CUtensorMap make_map(const MatricesMap& matrices) { return encode(layout_of(matrices)); }

}  // namespace intarsia::cuda::sm90
