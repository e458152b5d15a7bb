// The router's three products on wgmma. An fp32 operand enters as a sum of 16-bit parts, one matrix each, made by the caller
// (cuda/routing/router_parts.h); products of parts below the last bit that is kept are left out.
#pragma once

#include <cstdint>

#include "intarsia/types.h"

namespace intarsia::cuda::sm90 {

/// Most parts of one operand: three of bfloat16 are an fp32.
inline constexpr int kMostParts = 3;

/// logits (T, E) = sum over p of x w[p]^T + bias. x (T, H), w[p] (E, H) of x's dtype, bias (E) of it or float32 or absent.
void run_router_logits(const TensorView& x, const TensorView (&w)[kMostParts], int parts, const TensorView& bias,
                       const TensorView& logits, void* stream);

/// dx (T, H) = sum over p of left[p] right[p], or += . left[p] (T, E), right[p] (E, H), 16 bits, rows in whole chunks.
void run_router_dx(const TensorView (&left)[kMostParts], const TensorView (&right)[kMostParts], int parts, bool add,
                   const TensorView& dx, void* stream);

/// How dw_router is summed: `slices` parts of T rows each, a multiple of 64.
struct TokenSlices {
  std::int64_t slices, rows;
};
TokenSlices token_slices(std::int64_t tokens, std::int64_t hidden, std::int64_t experts, int parts, int device);

/// partial (slices, parts, E, H) fp32: of slice s and part p, left[p]^T x over the slice's tokens. row_token (T): the token
/// itself, or -1 for one that takes no part, whatever its x holds. At most two parts.
void run_router_dw(const TensorView (&left)[kMostParts], int parts, const TensorView& x, const TensorView& row_token,
                   const TokenSlices& slices, float* partial, void* stream);

}  // namespace intarsia::cuda::sm90
