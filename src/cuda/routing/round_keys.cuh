// What round_tokens orders by: a key for each (expert, token), made of the token's softmax probability and of whether it chose
// the expert. Keys are kept expert by expert, (E, T) transposed, so that an expert's block reads its own column only.
//   softmax_kernel   a token's largest logit and softmax sum, added in the order of base/softmax.h
//   key_kernel       keys of a panel of experts
#pragma once

#include "cuda/routing/softmax.cuh"
#include "cuda/routing/top_k.cuh"

namespace intarsia::cuda {

/// 0 for a token that is not valid; else the bits of p, plus one, and the highest bit for a choice: p lies in [0, 1], so its
/// bits order as it does and leave the highest one free.
template <class S>
struct RoundKey {
  using Bits = OrderKey<S>;
  static constexpr int kBits = 8 * sizeof(Bits);
  static constexpr Bits kChosen = Bits{1} << (kBits - 1);

  __device__ static __forceinline__ Bits of(float p, bool chosen) { return (__float_as_uint(p) + 1) | (chosen ? kChosen : 0); }
  __device__ static __forceinline__ Bits of(double p, bool chosen) {
    return (static_cast<std::uint64_t>(__double_as_longlong(p)) + 1) | (chosen ? kChosen : 0);
  }
  __device__ static __forceinline__ float probability(std::uint32_t key) { return __uint_as_float((key & ~kChosen) - 1); }
  __device__ static __forceinline__ double probability(std::uint64_t key) {
    return __longlong_as_double(static_cast<long long>((key & ~kChosen) - 1));
  }
};

constexpr int kTokenTile = kWarpSize;  // tokens of a block, a lane each where columns are handled

/// Warps of a block, each with a 32 x 32 tile of S in shared memory.
template <class S>
constexpr int kTileWarps = sizeof(S) == 4 ? 8 : 4;

/// Tile [i][j] of token i; a column more keeps the lanes of a column in different banks.
template <class V>
using Tile = V[kTokenTile][kTokenTile + 1];

/// A block takes 32 tokens; valid[block] = how many of them are. ids (T, K) as route (softmax) gives them: < 0 = not valid.
template <class T, class S = Wide<T>>
static __global__ void __launch_bounds__(kTileWarps<S>* kWarpSize)
    softmax_kernel(const __grid_constant__ Rows<const T> logits, std::int64_t tokens, int experts, const std::int32_t* ids,
                   int k_count, RowSoftmax<S>* softmax, std::int32_t* valid) {
  constexpr int kWarps = kTileWarps<S>;
  __shared__ Tile<S> tiles[kWarps];
  __shared__ S largest[kTokenTile];
  const std::int64_t t0 = std::int64_t{blockIdx.x} * kTokenTile;
  const int w = warp_index(), lane = lane_index();
  const unsigned is_valid = __ballot_sync(kAllLanes, t0 + lane < tokens && ids[(t0 + lane) * k_count] >= 0);  // a bit a token

  for (int i = w; i < kTokenTile; i += kWarps) {
    S best = -INFINITY;
    if (is_valid >> i & 1u)
      for (int e = lane; e < experts; e += kWarpSize) best = Max{}(best, static_cast<S>(widen(*logits.at(t0 + i, e))));
    best = warp_reduce(best, Max{});
    if (lane == 0) largest[i] = best;
  }
  __syncthreads();

  S sum = S(0);  // of token t0 + lane, in warp 0
  for (int first = 0; first < experts; first += kWarps * kWarpSize) {
    const int e = first + w * kWarpSize + lane;
#pragma unroll 4
    for (int i = 0; i < kTokenTile; ++i)
      tiles[w][i][lane] =
          e < experts && is_valid >> i & 1u ? exp(static_cast<S>(widen(*logits.at(t0 + i, e))) - largest[i]) : S(0);
    __syncthreads();
    if (w == 0)
      for (int other = 0; other < kWarps; ++other)
#pragma unroll 8
        for (int j = 0; j < kTokenTile; ++j) sum += tiles[other][lane][j];  // one by one: the order decides the last bit
    __syncthreads();
  }
  if (w != 0) return;
  if (t0 + lane < tokens) softmax[t0 + lane] = {largest[lane], sum};
  const unsigned ballot = __ballot_sync(kAllLanes, sum > S(0));
  if (lane == 0) valid[blockIdx.x] = __popc(ballot);
}

/// Grid (token tiles, groups of kTileWarps * 32 experts). keys (panel, pitch): row e - first_expert, column t; whole tiles are
/// written.
template <class T, class S = Wide<T>>
static __global__ void __launch_bounds__(kTileWarps<S>* kWarpSize)
    key_kernel(const __grid_constant__ Rows<const T> logits, std::int64_t tokens, int first_expert, int last_expert,
               const std::int32_t* ids, int k_count, const RowSoftmax<S>* softmax, OrderKey<S>* keys, std::int64_t pitch) {
  __shared__ Tile<OrderKey<S>> tiles[kTileWarps<S>];
  auto& tile = tiles[warp_index()];
  const int lane = lane_index();
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokenTile + lane;  // this lane's token
  const int e0 =
      first_expert + (static_cast<int>(blockIdx.y) * kTileWarps<S> + warp_index()) * kWarpSize;  // this warp's experts
  if (e0 >= last_expert) return;

  const RowSoftmax<S> row = t < tokens ? softmax[t] : RowSoftmax<S>{S(0), S(0)};
  unsigned chosen = 0;  // which of the warp's experts this lane's token chose
  if (row.valid()) {
    for (int k = 0; k < k_count; ++k) {
      const unsigned place = static_cast<unsigned>(ids[t * k_count + k] - e0);
      if (place < kWarpSize) chosen |= 1u << place;
    }
  }
#pragma unroll 4
  for (int i = 0; i < kTokenTile; ++i) {
    const RowSoftmax<S> of_token{__shfl_sync(kAllLanes, row.largest, i), __shfl_sync(kAllLanes, row.sum, i)};
    const unsigned choices = __shfl_sync(kAllLanes, chosen, i);
    OrderKey<S> key = 0;
    if (of_token.valid() && e0 + lane < last_expert)
      key = RoundKey<S>::of(of_token(static_cast<S>(widen(*logits.at(t - lane + i, e0 + lane)))), choices >> lane & 1u);
    tile[i][lane] = key;
  }
  __syncwarp();
  for (int j = 0; j < kWarpSize && e0 + j < last_expert; ++j) keys[(e0 - first_expert + j) * pitch + t] = tile[lane][j];
}

}  // namespace intarsia::cuda
