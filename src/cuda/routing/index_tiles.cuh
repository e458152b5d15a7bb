// Counting the slots of each expert in tiles of slots, shared by build_index and round_tokens:
//   count_kernel   counts (tiles, E): slots of each expert in each tile, by atomics on shared memory (sums of integers)
//   scan_kernel    counts -> those of the earlier tiles; totals (E)
// A block handles a panel of at most 1024 experts, so that its counters fit in shared memory whatever E is.
#pragma once

#include <algorithm>

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

constexpr int kIndexWarps = 8, kIndexThreads = kIndexWarps * kWarpSize;
constexpr int kExpertPanel = 1024, kMostTiles = 512;

/// A tile holds at least 2 * E slots, so that its counts are few beside them; at most kMostTiles tiles, or 1024 slots each.
struct IndexTiles {
  std::int64_t slots;
  int k_count, experts, tile, count, panels;

  IndexTiles(std::int64_t tokens, std::int64_t k, std::int64_t e)
      : slots(tokens * k),
        k_count(static_cast<int>(k)),
        experts(static_cast<int>(e)),
        tile(static_cast<int>(ceil_div(std::max({std::int64_t{1024}, 2 * e, ceil_div(slots, kMostTiles)}), kIndexThreads) *
                              kIndexThreads)),
        count(static_cast<int>(std::max<std::int64_t>(1, ceil_div(slots, tile)))),
        panels(static_cast<int>(ceil_div(e, kExpertPanel))) {}
  dim3 grid() const { return dim3(static_cast<unsigned>(count), static_cast<unsigned>(panels)); }
  std::int64_t cells() const { return std::int64_t{count} * experts; }
};

struct Slots {
  Ids ids;
  TokenMask mask;
  IndexTiles tiles;

  __device__ __forceinline__ int expert(std::int64_t slot) const {
    if (mask.bytes && !mask(static_cast<unsigned>(slot) / static_cast<unsigned>(tiles.k_count))) return -1;
    return ids.expert(slot, tiles.experts);
  }
};

/// Grid (tiles, panels). counts is (tiles, E).
static __global__ void __launch_bounds__(kIndexThreads)
    count_kernel(const __grid_constant__ Slots slots, std::int32_t* counts) {
  __shared__ int count[kExpertPanel];
  const IndexTiles& tiles = slots.tiles;
  const int first_expert = static_cast<int>(blockIdx.y) * kExpertPanel, panel = min(kExpertPanel, tiles.experts - first_expert);
  for (int i = threadIdx.x; i < panel; i += kIndexThreads) count[i] = 0;
  __syncthreads();
  const std::int64_t first = std::int64_t{blockIdx.x} * tiles.tile,
                     last = min(first + tiles.tile, static_cast<std::int64_t>(tiles.slots));
#pragma unroll 4
  for (std::int64_t slot = first + threadIdx.x; slot < last; slot += kIndexThreads) {
    const int i = slots.expert(slot) - first_expert;
    if (i >= 0 && i < panel) atomicAdd(&count[i], 1);
  }
  __syncthreads();
  std::int32_t* const row = counts + std::int64_t{blockIdx.x} * tiles.experts + first_expert;
  for (int i = threadIdx.x; i < panel; i += kIndexThreads) row[i] = count[i];
}

constexpr int kScanWarps = 32, kTilesOfWarp = kMostTiles / kScanWarps;

/// A block takes 32 experts, one a lane; its warps share the tiles, whose counts a thread reads all at once. In place: counts
/// become the sums over the earlier tiles.
static __global__ void __launch_bounds__(kScanWarps* kWarpSize)
    scan_kernel(std::int32_t* counts, int tiles, int experts, std::int32_t* totals) {
  __shared__ int of_warp[kScanWarps][kWarpSize];
  const int e = static_cast<int>(blockIdx.x) * kWarpSize + lane_index(), w = warp_index();
  const int share = (tiles + kScanWarps - 1) / kScanWarps, first = min(w * share, tiles), here = min(share, tiles - first);
  std::int32_t* const cell = counts + std::int64_t{first} * experts + e;
  int count[kTilesOfWarp], sum = 0;
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) count[i] = i < here && e < experts ? cell[i * experts] : 0;
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) sum += count[i];
  of_warp[w][lane_index()] = sum;
  __syncthreads();
  int before = 0;
  for (int other = 0; other < w; ++other) before += of_warp[other][lane_index()];
  if (e >= experts) return;
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) {
    if (i < here) cell[i * experts] = before;
    before += count[i];
  }
  if (w == kScanWarps - 1) totals[e] = before;
}

inline void launch_count(const char* name, const Slots& slots, std::int32_t* counts, std::int32_t* totals,
                         cudaStream_t stream) {
  const IndexTiles& tiles = slots.tiles;
  launch(name, count_kernel, tiles.grid(), kIndexThreads, stream, 0, slots, counts);
  launch(name, scan_kernel, blocks(tiles.experts, kWarpSize), kScanWarps * kWarpSize, stream, 0, counts, tiles.count,
         tiles.experts, totals);
}

}  // namespace intarsia::cuda
