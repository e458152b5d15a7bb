// Sums over tokens for the losses: tokens are cut into slices by T alone, a block adds up a slice, the slices are added in
// order.
#pragma once

#include <algorithm>

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

/// At most 264 slices (two for each multiprocessor of an H200), or 32 tokens each; one when there are no tokens.
struct TokenSlices {
  std::int64_t tokens, size;
  int count;
  explicit TokenSlices(std::int64_t t)
      : tokens(t),
        size(std::max<std::int64_t>(32, ceil_div(t, 264))),
        count(static_cast<int>(std::max<std::int64_t>(1, ceil_div(t, size)))) {}
  __device__ __forceinline__ std::int64_t first(std::int64_t slice) const {
    return min(slice * size, static_cast<std::int64_t>(tokens));
  }
  __device__ __forceinline__ std::int64_t last(std::int64_t slice) const { return first(slice + 1); }
};

}  // namespace intarsia::cuda
